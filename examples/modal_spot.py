"""dtrain on Modal: a run that lives in a bucket and survives the preemption of its container (docs/launchers.md#modal).

    pip install modal
    modal run --detach examples/modal_spot.py

Modal interrupts a function that it preempts and starts it again with the same input, on a machine with an empty disk. The run
saves, uploads to ``checkpoint.mirror``, and continues from there. Lines to adapt are marked EDIT.
"""

from __future__ import annotations

import subprocess

import modal

OVERRIDES = ["experiment=digits", "run.dir=runs/digits", "checkpoint.mirror=s3://BUCKET/runs/digits"]  # EDIT
STOPPED = 75  # exit code of a run that was stopped and can be resumed

image = modal.Image.debian_slim("3.12").apt_install("git")
image = image.pip_install("dtrain[demo,s3] @ git+https://github.com/dtrain-developers/dtrain")
app = modal.App("dtrain")


@app.function(
    image=image,
    gpu="H100:2",  # EDIT
    secrets=[
        modal.Secret.from_name("bucket-credentials")
    ],  # EDIT: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION
    timeout=24 * 3600,  # EDIT: seconds, the most that Modal allows; `retries` starts the next part
    retries=modal.Retries(max_retries=10, backoff_coefficient=1.0, initial_delay=60.0),
)
def train(overrides: list[str]) -> None:
    """Trains until the run is finished. Raises if it was stopped or has failed, so that Modal starts it again."""
    command = ["dtrain", "launch", "launch=local", *overrides, "checkpoint.every_minutes=5"]
    with subprocess.Popen(command, start_new_session=True) as launch:
        try:
            code = launch.wait()
        except BaseException:
            launch.terminate()  # Modal interrupts the function: the run saves and uploads
            launch.wait()
            raise
    if code:
        raise RuntimeError("stopped" if code == STOPPED else f"failed with exit code {code}; its output is above")


@app.local_entrypoint()
def main() -> None:
    """Starts the training on Modal."""
    train.remote(OVERRIDES)
