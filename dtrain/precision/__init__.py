"""Precision: a run computes in fp32, tf32, bf16 or fp16, and all its ranks skip the same steps.

In reading order:

* ``policy``: transfer dtypes, autocast, loss scaling and hardware checks of each precision; modules that stay in fp32.
* ``loss_scale``: the dynamic loss scale of fp16.
* ``gradients``: the gradients of one rank: their list and their norm; checking and unscaling for ``grad_scaler``.
* ``vote``: one all-reduce of control data per step, after which all ranks take the same decision.
* ``spike``: finds steps whose gradient norm is far above the norms of the previous steps, for the vote.
* ``grad_scaler``: a replacement of ``torch.amp.GradScaler`` for hand-written loops, with which all ranks skip the same steps.
* ``reduce_dtype``: the dtype in which DDP reduces gradients.
* ``skip_diagnosis``: names the module, parameter and sample that caused a series of skipped steps.
* ``autocast_check``: names the modules of an fp32 run that compute in 16 bits.
* ``fused_optimizers``, ``modules``, ``flops``: helpers: optimizers that skip a step on the device, walks over modules, and
  the FLOPs of an operator.
* ``audit``: for ``doctor numerics``: dtypes, FLOPs and value ranges of every module, and advised settings.
"""

from dtrain.precision.grad_scaler import CrossRankGradScaler
from dtrain.precision.policy import Precision

__all__ = ["CrossRankGradScaler", "Precision"]
