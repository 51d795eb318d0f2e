"""Exports a checkpoint as an artefact: ``dtrain export run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]``.

``dtrain.export.pipeline`` has the phases of an export; ``dtrain.export`` says what an artefact is.
"""

from __future__ import annotations

import sys

from dtrain import command_line
from dtrain.errors import ConfigError
from dtrain.export import benchmark
from dtrain.export.pipeline import export
from dtrain.runs.recompose import recompose, take

USAGE = """Usage
  dtrain export run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]
  dtrain export measure ARTEFACT [ARTEFACT ...]    measures existing artefacts; see measure --help

Options
  run.dir=DIR                    the run's directory
  export.dtype=fp32|bf16|fp16    dtype of the weights (default: bf16)
  export.format=safetensors      weights in a safetensors file; the model is built by its _target_ (default)
  export.format=pt2              a program for torch.export.load; needs no training code
  export.format=aotinductor      a program compiled for one kind of device; exporting needs a C++ compiler
  export.format=onnx             a graph for onnxruntime and other runtimes, fp32 or fp16; needs the extra dtrain[onnx]
  export.format=[FORMAT,...]     several formats, each in the folder export.out/FORMAT
  export.out=DIR2                folder to write (default: DIR/export); an artefact in its place is replaced
  export.tolerance=X             largest error of an output, as a fraction of the largest fp32 output (default: fp32 0.001,
                                 fp16 0.01, bf16 0.08)
  export.max_metric_difference=X largest difference of accuracy, loss, ... from fp32 (default: fp32 0.001, fp16 0.01,
                                 bf16 0.02)
  export.measure=false           do not compare latency, throughput and memory with those of the same weights in fp32
  export.batch=[1,32]            batch sizes to measure
  export.max_latency_ms=X        also find the largest batch that takes at most X ms
  export.max_memory_gib=X        also find the largest batch that takes at most X GiB
  export.fold=false              keep BatchNorm, so that a new run can start from the weights (run.weights_from)
  export.adapter=separate        write only the adapter (LoRA) of the model, in peft's format; kept: base and adapter as they
                                 were trained (default: merged into the weights)
  export.push=hf://ORG/NAME      also publish the artefact with a model card on the Hugging Face hub; ORG/NAME@BRANCH for a
                                 branch. The token is HF_TOKEN, or comes from `hf auth login`; needs the extra dtrain[hf]
  export.private=false           a repository that the push creates is public (default: private)
  export.license=NAME            licence in the model card, such as apache-2.0
  export.intended_use=TEXT       what the model is for, in the model card; export.limitations=TEXT: where it fails
  export.push_replace=true       replace a repository that has a different model
  checkpoint=best|latest|STEP    which checkpoint (default: best if the run keeps one, else latest)
  weights=ema|raw                averaged or raw weights (default: ema if the run has them)
  samples=N                      rows of data.eval for the comparison with fp32 (default: 512; 0: no comparison)
  --trust                        use a run that a different user started: its saved command line can run any code
  KEY=VALUE                      any key of the config, such as 'precision.keep_fp32=[head]' or data.eval=null
"""
OPTIONS = {"checkpoint": "", "weights": "", "samples": "512"}


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["measure"]:
        sys.exit(benchmark.main(sys.argv[2:]))
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    options, rest = take(sys.argv[1:], **OPTIONS)

    def rewrite(arguments: list[str]) -> list[str]:
        if any(argument.lstrip("+").startswith(("export.token=", "export.hf_token=")) for argument in arguments):
            raise ConfigError(
                "export.token: there is no such key, because others can see a command line, and it is saved. Set the "
                "environment variable HF_TOKEN, or run `hf auth login` once."
            )
        return recompose(arguments)

    command_line.run(
        lambda composed: export(composed, options["checkpoint"], options["weights"], options["samples"]),
        rest,
        rewrite=rewrite,
    )


if __name__ == "__main__":
    main()
