"""dtrain: distributed PyTorch training from plain tar shards.

* ``dtrain.data``: every sample of an epoch exactly once, in an order that does not depend on ranks or workers.
* ``dtrain.precision``: one key determines transfer dtypes, autocast, gradient scaling and the dtype of exports.
* ``dtrain.training``: the loop, one optimizer step, checkpoints.
* ``python -m dtrain.train``: from a Hydra config to a trained model.
"""

__version__ = "0.1.0"
