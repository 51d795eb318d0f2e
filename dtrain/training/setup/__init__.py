"""The parts of a training run.

* ``loaders``: loaders for training and evaluation, from the config.
* ``model``: memory layout, activation checkpointing, compilation. ``compile_cache``: keeps compiled code for later starts.
* ``sharded_init``: initial weights of a sharded model, from rank 0.
* ``batchnorm``: statistics of valid rows only. ``freeze``: parameters that are not trained.
* ``optimizer``: builds and checks the optimizer. ``ema``: averaged weights. ``buffers``: restores buffers on skipped steps.
"""
