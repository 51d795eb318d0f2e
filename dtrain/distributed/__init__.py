"""Ranks: the process group, the few collectives that dtrain needs, requests to stop."""
