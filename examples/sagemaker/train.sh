#!/bin/bash
# The entry point of a SageMaker training job, on one machine or several (docs/launchers.md#sagemaker). Lines to adapt are marked EDIT.
# SageMaker puts the channels `train` and `val` into the folders that SM_CHANNEL_TRAIN and SM_CHANNEL_VAL name, and copies
# /opt/ml/checkpoints to the job's checkpoint_s3_uri and back, so that a job that was interrupted continues.
set -euo pipefail

options=(experiment=digits "data.train=$SM_CHANNEL_TRAIN/train-*.tar" "data.eval=$SM_CHANNEL_VAL/test-*.tar")     # EDIT
exec dtrain launch launch=local "${options[@]}" run.dir=/opt/ml/checkpoints/run checkpoint.every_minutes=5 "$@"
