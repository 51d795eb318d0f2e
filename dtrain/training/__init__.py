"""Training: the loop, one optimizer step, evaluation and checkpoints. The files in reading order:

1. The loop: ``task`` (for authors of tasks), ``step`` (one optimizer step), ``loop`` (steps, evaluations, saves, stop),
   ``evaluation``, ``hook_calls`` (user code at fixed points), ``breakpoints`` (of a debugger).
2. Building a run: ``build`` (connects all parts), ``optimizer``, ``loaders``, ``model_setup`` (memory layout, recomputation,
   compilation), ``sharded_init`` (initial values of sharded models, from rank 0),
   ``schedule``, ``tensor_copies`` (averaged weights, buffers that a skip restores), ``batchnorm`` (no masked rows in its
   statistics), ``checks`` (refused models and tasks),
   ``validation`` (all values, before anything is written).
3. Saving and resuming: ``state`` (the content of a checkpoint), ``checkpoints`` (folders), ``checkpoint_tensors`` (whole, or in
   the parts of ranks), ``checkpoint_manager`` (when, and in a thread), ``resume`` (where a start begins and ends, weights of
   another run), ``recovery`` (the others continue when a rank is lost).
4. Observing: ``run_logger`` (records, status, media, banner), ``metrics``, ``stragglers`` (slow ranks), ``communication``
   (bytes that a step sends), ``flops``, ``memory``, ``profiler``.
"""
