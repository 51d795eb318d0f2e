"""The model card of an artefact: ``README.md`` with the metadata of the Hugging Face hub, written from the run.

It says what the model is, what it was trained on and how, how good it is in fp32 and as exported, and the commands to use it
and to train it again. It contains no secret and no folder of this machine, and depends only on the run and the artefact,
so the same export writes the same card.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dtrain.export.artefact import CARD
from dtrain.export.description import Description
from dtrain.extras import install_command
from dtrain.runs.hub import HubModel, is_hub_url
from dtrain.runs.run_spec import RunSpec, without_folders

if TYPE_CHECKING:  # the package is optional
    from huggingface_hub import EvalResult, ModelCardData

_PIPELINES = {"Classification": "image-classification", "LanguageModelling": "text-generation"}
_DATASETS = "hf://datasets/"
_COUNTS = ("samples", "bad_samples")
_FACTS = ("property", "value")
#: Keys of the front matter that a push writes; keys that users have added stay.
_OWN_KEYS = ("library_name", "pipeline_tag", "tags", "datasets", "model-index")


@dataclass(frozen=True)
class ModelCard:
    """The facts of a model card.

    Attributes:
        model: The repository.
        spec: The run.
        config: The run's config as other people may see it (``RunSpec.published``).
        description: Description of the artefact.
        report: Content of ``report.json``.
        state: State of the checkpoint.
        parameters: Number of the model's parameters.
        license: Licence, as the hub names it; None if the user states none.
        intended_use: What the model is for, in the user's words (Markdown); None if not stated.
        limitations: Where it fails or must not be used, in the user's words (Markdown); None if not stated.
        front_matter: Metadata of the card that is in the repository now.
    """

    model: HubModel
    spec: RunSpec
    config: Mapping[str, Any]
    description: Description
    report: Mapping[str, Any]
    state: Mapping[str, Any]
    parameters: int
    license: str | None
    intended_use: str | None
    limitations: str | None
    front_matter: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Writes ``README.md`` into the folder of the artefact.

        Raises:
            OSError: On a write failure.
        """
        text = "\n\n".join((f"---\n{self.metadata().to_yaml()}\n---", *self._sections()))
        (folder / CARD).write_text(f"{text}\n", encoding="utf-8")

    def metadata(self) -> ModelCardData:
        """The front matter. What others have added to it in the repository, such as a licence, stays."""
        from huggingface_hub import ModelCardData

        results = self._results()
        data = ModelCardData(
            license=self.license,
            library_name="dtrain",
            pipeline_tag=self._pipeline,
            tags=["dtrain", "pytorch", self.description.dtype],
            datasets=self._datasets or None,
            base_model=self._base_models or None,
            base_model_relation="finetune" if self._base_models else None,
            eval_results=results or None,
            model_name=self._name if results else None,
        )
        for key, value in self.front_matter.items():
            if key not in _OWN_KEYS and data.get(key) is None:
                data[key] = value
        return data

    # -- the parts

    @property
    def _name(self) -> str:
        return self.model.name.split("/")[1]

    @property
    def _task(self) -> str:
        return str(self.description.source.get("task")).rpartition(".")[2]

    @property
    def _pipeline(self) -> str | None:
        if self._task == "Classification" and self.description.input is None:
            return None
        return _PIPELINES.get(self._task)

    @property
    def _datasets(self) -> list[str]:
        """Names of the datasets of the hub."""
        named = [text for text in _texts(self.config["data"]) if text.startswith(_DATASETS)]
        names = ("/".join(text.removeprefix(_DATASETS).split("/")[:2]).partition("@")[0] for text in named)
        return sorted({*names})

    @property
    def _base_models(self) -> list[str]:
        """Names of the models of the hub that the run began with."""
        run = self.config["run"]
        urls = (run.get("weights_from"), run["warm_start"].get("path"))
        return [HubModel.parse("run", url).name for url in urls if url is not None and is_hub_url(url)]

    @property
    def _data_name(self) -> str:
        preset = next(
            (it.partition("=")[2] for it in self.spec.command() if it.startswith(("experiment=", "data="))), None
        )
        return self._datasets[0] if self._datasets else preset or "own data"

    def _evaluated(self) -> dict[str, float]:
        """Metrics of the checkpoint on the whole evaluation set, by name without ``eval/``."""
        metrics = self.description.source.get("metrics") or {}
        named = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        return {
            name: value for name, value in named.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }

    def _results(self) -> list[EvalResult]:
        from huggingface_hub import EvalResult

        return [
            EvalResult(
                task_type=self._pipeline or "other",
                dataset_type=self._data_name,
                dataset_name=self._data_name,
                dataset_split="evaluation",
                metric_type=name.rpartition("/")[2],
                metric_name=name,
                metric_value=value,
            )
            for name, value in self._evaluated().items()
            if name.rpartition("/")[2] not in _COUNTS
        ]

    def _sections(self) -> Iterator[str]:
        description = self.description
        target = str(description.model.get("_target_"))
        kind = {"image-classification": "classifies images", "text-generation": "continues texts"}.get(
            self._pipeline or ""
        )
        yield f"# {self._name}"
        purpose = kind or f"was trained for `{self._task}`"
        yield (
            f"`{target.rpartition('.')[2]}` with {self.parameters:,} parameters, which {purpose}. "
            "Trained and exported with [dtrain](https://github.com/dtrain-developers/dtrain)."
        )
        yield from ("## Use", self._use())
        yield from ("## Intended use", (self.intended_use or "Not stated.").strip())
        yield from ("## Limitations", (self.limitations or "Not stated.").strip())
        yield from ("## Results", *self._metrics())
        yield from ("## Model", _table(self._model_rows()))
        yield from ("## Data", _table(self._data_rows()))
        yield from ("## Training", _table(self._training_rows()))
        yield from ("To repeat the training:", _code("bash", self._train_command()))
        yield (
            "`config.yaml` has all settings. In both, paths are shortened to the names of files and folders. `model.json` and "
            "`report.json` describe the artefact and its comparison with fp32."
        )
        license = self.metadata().get("license")
        yield from (
            "## Licence",
            f"`{license}`" if license else "Not stated. Ask the authors before you use the model.",
        )

    def _use(self) -> str:
        url, image = f"hf://{self.model.name}", self.description.input
        lines = [install_command("hf")]
        if self._pipeline == "image-classification":
            lines.append(f"dtrain predict {url} photo.jpg")
        if self.description.tokenizer is not None:
            lines.append(f'dtrain predict {url} --prompt "Once upon a time"')
        shape = f"{image.field}: uint8 [rows, height, width, 3]" if image is not None else "the argument of the model"
        if self.description.rows is not None:
            shape = str(self.description.rows)
        python = ["from dtrain.export import from_hub", "", f'model = from_hub("{self.model.name}")']
        python += [f"outputs = model.outputs(rows)  # rows: {shape}; outputs: fp32"]
        return f"{_code('bash', lines)}\n\n{_code('python', python)}"

    def _metrics(self) -> Iterator[str]:
        comparison, dtype = self.report["comparison"], self.description.dtype
        evaluated = {name: value for name, value in self._evaluated().items() if name not in _COUNTS}
        if evaluated:
            counted = self._evaluated().get("samples")
            samples = f"{counted:,.0f} samples" if counted is not None else "samples"
            yield f"On all {samples} of the evaluation data, in {self.description.source.get('trained_in')}, before the export:"
            yield _table(
                [("metric", "value"), *((_literal(name), _number(value)) for name, value in evaluated.items())]
            )
        if comparison is None:
            yield f"The exported weights were not compared with fp32: {self.report['not_compared']}."
            return
        yield f"The exported weights compared with fp32, on {comparison['samples']:,} samples of the evaluation data:"
        rows = [("metric", "fp32", f"exported ({dtype})", "difference")]
        rows += [
            (_literal(name), _number(both["fp32"]), _number(both["exported"]), f"{both['difference']:+.2g}")
            for name, both in comparison["metrics"].items()
        ]
        rows.append(("largest error of an output", "", _number(comparison["max_abs_error"]), ""))
        if "top1_agreement" in comparison:
            rows.append(("same best class as fp32", "", f"{comparison['top1_agreement']:.2%}", ""))
        yield _table(rows)

    def _model_rows(self) -> list[tuple[str, ...]]:
        description, image = self.description, self.description.input
        arguments = {key: value for key, value in description.model.items() if key != "_target_"}
        rows: list[tuple[str, ...]] = [_FACTS, ("class", _literal(description.model.get("_target_")))]
        rows.append(("arguments", _literal(_inline(arguments)) if arguments else "none"))
        size = f"{self.report['bytes']['exported']:,} bytes, {self.report['ratio']:.2f} of fp32"
        kept = f"; fp32 in {_literal(', '.join(description.keep_fp32))}" if description.keep_fp32 else ""
        rows.append(("weights", f"{description.dtype}{kept}, {size}, stored as {description.stored_as}"))
        if description.folded:
            rows.append(("BatchNorm", f"{len(description.folded)} merged into the convolutions before them"))
        if image is not None:
            size = f"{' x '.join(map(str, image.size))} pixels" if image.size is not None else "of any size"
            resized = f", shorter side resized to {image.shorter_side} and cropped" if image.shorter_side else ""
            values = f"mean {_inline(list(image.mean))}, standard deviation {_inline(list(image.std))}"
            rows.append(("input", f"image, {size}{resized}, normalised by {values}"))
        elif description.rows is not None:
            rows.append(("input", _literal(description.rows)))
        if description.tokenizer is not None:
            rows.append(("tokenizer", f"{_literal(description.tokenizer)}, in `vocabulary.json`"))
        if description.classes is not None:
            shown = ", ".join(description.classes[:20]) + (", ..." if len(description.classes) > 20 else "")
            rows.append(("classes", f"{len(description.classes)}: {_literal(shown)}"))
        return rows

    def _data_rows(self) -> list[tuple[str, ...]]:
        data, index = self.config["data"], self.state["loader"].get("data", {})  # a mixture has several
        rows: list[tuple[str, ...]] = [_FACTS]
        sources = {"training data": data.get("mixture") or data.get("train"), "evaluation data": data.get("eval")}
        rows += [(name, _literal(_inline(source))) for name, source in sources.items() if source]
        facts = (("num_samples", "samples"), ("num_shards", "shards"), ("bytes", "bytes"))
        counts = [f"{index[key]:,} {unit}" for key, unit in facts if isinstance(index.get(key), int)]
        rows += [("size", ", ".join(counts))] if counts else []
        rows += [("fingerprint", _literal(index["fingerprint"]))] if "fingerprint" in index else []
        rows += [(key, _literal(_inline(data[key]))) for key in ("fields", "augment", "mix") if data.get(key)]
        return rows

    def _training_rows(self) -> list[tuple[str, ...]]:
        train, state, source = self.config["train"], self.state, self.description.source
        counters, progress, done = state["counters"], state["progress"], state["environment"]
        versions = {**state["versions"], "exported with dtrain": self.description.versions.get("dtrain")}
        hours = progress["seconds"] / 3600
        code = ", ".join(f"{name} {commit}" for name, commit in done["code"].items())
        rows = {
            "run": _literal(source.get("run")),
            "steps": f"{source.get('checkpoint_step'):,}, {counters['applied_steps']} of them applied",
            "samples": f"{progress['samples']:,}",
            "weights of": "the moving average" if source.get("weights") == "ema" else "the last step",
            "global batch": f"{train['global_batch_size']:,}",
            "optimizer": _literal(_inline(self.config["optimizer"])),
            "schedule": _literal(_inline(self.config["schedule"])),
            "precision": str(source.get("trained_in")),
            "seed": str(self.config["run"].get("seed")),
            "initial weights": _literal(
                self.config["run"].get("weights_from") or self.config["run"]["warm_start"].get("path") or ""
            ),
            "hardware": f"{done['ranks']} x {done['device']}",
            "time": f"{hours:.2f} hours of training"
            if hours >= 0.1
            else f"{progress['seconds']:.0f} seconds of training",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            "code": _literal(code) if code else "",
        }
        return [_FACTS, *((name, value) for name, value in rows.items() if value and value != "``")]

    def _train_command(self) -> list[str]:
        """What was typed, with paths of this machine reduced to names, and the number of processes."""
        done = self.state["environment"]
        ranks, local = done["ranks"], done["ranks_of_a_machine"]
        start = "dtrain train" if ranks == 1 else f"dtrain train --nproc {ranks}"
        if ranks > local:
            start = f"torchrun --nnodes={ranks // local} --nproc-per-node={local} --rdzv-endpoint=HOST:29500 -m dtrain.train"
        return [" ".join([start, *map(shlex.quote, self.spec.command())])]


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; the first row is its heading."""
    heading, *others = rows
    lines = [heading, ("---",) * len(heading), *others]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _literal(value: object) -> str:
    """Text that is not read as Markdown or HTML; ``""`` stays."""
    text = " ".join(str(without_folders(str(value))).replace("`", "'").split())
    return f"`{text}`" if text else ""


def _code(language: str, lines: Sequence[str]) -> str:
    text = "\n".join(lines).replace("```", "'''")
    return f"```{language}\n{text}\n```"


def _inline(value: object) -> str:
    """A value of the config on one line."""
    if isinstance(value, str):
        return value
    return " ".join(
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).split()
    ).removesuffix(" ...")


def _number(value: float) -> str:
    return f"{value:.4g}" if value else "0"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
