"""A package, so that tests import ``tests.ranks``; folders under it mirror ``dtrain``."""
