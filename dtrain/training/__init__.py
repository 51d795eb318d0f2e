"""Training: the loop, one optimizer step, evaluation and checkpoints. In reading order:

1. The loop: ``task`` (for authors of tasks), ``step`` (one optimizer step), ``loop`` (steps, evaluations, saves, stop),
   ``evaluation``, ``metrics`` (that are no sums), ``hook_calls`` (user code at fixed points), ``breakpoints`` (of a debugger),
   ``micro_batch`` (the largest that fits), ``step_memory`` and ``memory_usage`` (computed without needing it),
   ``memory_retry`` and ``unfinished`` (when memory runs out).
2. Building a run: ``build`` (connects all parts), ``schedule``, ``checks`` (refused models and tasks), ``validation`` (all
   values, before anything is written). ``setup`` has the parts.
3. ``checkpoint``: saving and resuming. ``recovery``: the others continue when a rank is lost.
4. ``monitor``: metrics, slow ranks, communication, FLOPs, memory, profiles.
"""
