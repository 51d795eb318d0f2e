"""Training: the loop, one optimizer step, evaluation and checkpoints. In reading order:

1. The loop: ``task`` (for authors of tasks), ``step`` (one optimizer step), ``loop`` (steps, evaluations, saves, stop),
   ``evaluation``, ``metrics`` (metrics of torchmetrics, which are not sums), ``hook_calls`` (user code at fixed points),
   ``breakpoints`` (``breakpoint()`` in user code), ``micro_batch`` (finds the largest micro-batch that fits),
   ``step_memory`` and ``memory_usage`` (compute the memory of a step without allocating it), ``memory_retry`` and
   ``unfinished`` (repeat a step when memory runs out).
2. Building a run: ``build`` (connects all parts), ``schedule``, ``checks`` (refuses models and tasks that would train wrongly),
   ``validation`` (checks all values before anything is written). ``setup`` has the parts.
3. ``checkpoint``: saving and resuming. ``recovery``: the other ranks continue when a rank is lost.
4. ``monitor``: metrics, slow ranks, communication, FLOPs, memory, profiles.
"""
