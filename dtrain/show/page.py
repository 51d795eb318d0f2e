"""The facts of a split as a page, as lines on a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtrain.console import size_text
from dtrain.report.gallery import Card, Part, Table
from dtrain.report.style import count_of, format_number, format_percent, join_some
from dtrain.show.counts import Duplicates, Examined, Labels, Sizes
from dtrain.show.fields import FieldFacts
from dtrain.show.looks import Looks
from dtrain.show.split import Split

_MOST_CLASSES, _MOST_BAD, _MOST_GROUPS, _MOST_EXTENSIONS = 200, 50, 20, 30
_MOST_IN_JSON = 1000


@dataclass
class Facts:
    """All facts about a split.

    Attributes:
        split: The split.
        epoch: Number of the epoch.
        seed: Seed of the run.
        precision: Name of the precision.
        global_batch_size: Samples of a step.
        shown: Keys of the rows that are shown.
        fields: Facts of each field.
        looks: The names of classes.
        labels: Split to field to labels.
        share: Samples of rank 0 in the epoch, int64, shape ``[n]``; None with one rank, or in a stream.
        examined: What reading samples found: of this split first.
        sizes: Sizes of members; None without shards.
        extensions: Extension to number of members; how many shards were counted, and of how many.
        duplicates: Duplicates among the samples that were examined; None in a stream.
        lacking: Split to field to classes that it lacks.
        advice: Sentences about fields that could be smaller in transfer.
        notes: What is not shown, and why.
    """

    split: Split
    epoch: int
    seed: int
    precision: str
    global_batch_size: int
    shown: Sequence[str]
    fields: Mapping[str, FieldFacts]
    looks: Looks
    labels: Mapping[str, Mapping[str, Labels]]
    share: np.ndarray | None
    examined: Sequence[Examined]
    sizes: Sizes | None
    extensions: tuple[Mapping[str, int], int, int]
    duplicates: Duplicates | None
    lacking: Mapping[str, Mapping[str, Sequence[int]]]
    advice: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def own(self) -> Examined:
        """What was found in the split itself."""
        return self.examined[0]

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        extensions, shards, of = self.extensions
        twice = self.duplicates
        return {
            "split": self.split.name,
            "samples": self.split.num_samples,
            "epoch": self.epoch,
            "seed": self.seed,
            "precision": self.precision,
            "global_batch_size": self.global_batch_size,
            "ranks": self.split.ranks,
            "shown": list(self.shown),
            "fields": {name: facts.to_json() for name, facts in self.fields.items()},
            "labels": {name: self._labels_to_json(it) for name, it in self.labels.get(self.split.name, {}).items()},
            "extensions": {"shards": shards, "of": of, "counts": dict(extensions)},
            "sizes": None if self.sizes is None else _sizes_to_json(self.sizes),
            "bad": {
                "examined": self.own.samples,
                "count": len(self.own.bad),
                "samples": [{"key": key, "reason": reason} for key, reason in self.own.bad[:_MOST_IN_JSON]],
            },
            "duplicates": None
            if twice is None
            else {
                "examined": {each.split: each.samples for each in self.examined},
                "within": {split: list(groups[:_MOST_IN_JSON]) for split, groups in twice.within.items()},
                "between": list(twice.between[:_MOST_IN_JSON]),
                "conflicts": twice.conflicts,
            },
            "lacking": {
                split: {name: [self.looks.class_name(each) for each in classes] for name, classes in of.items()}
                for split, of in self.lacking.items()
            },
            "notes": [*self.notes, *self.advice],
        }

    def _labels_to_json(self, labels: Labels) -> dict[str, Any]:
        def named(counts: Mapping[int, int]) -> dict[str, int]:
            return {self.looks.class_name(label): count for label, count in counts.items()}

        rank0 = None if self.share is None else named(labels.counts(self.share))
        return {"counted": len(labels.values), "counts": named(labels.counts()), "rank0": rank0}

    def findings(self) -> Iterator[tuple[str, str]]:
        """Level and sentence of what needs attention; one that nothing does, if nothing does."""
        found = False
        for level, text in self._problems():
            found = True
            yield level, text
        if not found:
            yield "ok", f"no problem in {' and '.join(map(_of, self.examined))}"

    def _problems(self) -> Iterator[tuple[str, str]]:
        for each in self.examined:
            if each.bad:
                key, reason = each.bad[0]
                yield (
                    "warning",
                    f"{count_of(len(each.bad), 'bad sample')} in {_of(each)}: {key}: {reason}",
                )
        if self.sizes is not None:
            for ext, (*_, absent) in self.sizes.fields.items():
                if absent:
                    yield "warning", f"{count_of(absent, 'sample')} without a member .{ext}"
        for split, of in self.lacking.items():
            for name, classes in of.items():
                names = join_some([self.looks.class_name(each) for each in classes])
                labels = self.labels[split][name]
                yield "warning", f"{split} has no sample with {name} {names}, among {len(labels.values):,} labels"
        if (twice := self.duplicates) is not None:
            for split, groups in twice.within.items():
                if groups:
                    extra = sum(map(len, groups)) - len(groups)
                    yield (
                        "warning",
                        f"{split}: {count_of(extra, 'exact duplicate')}, such as {' = '.join(groups[0][:3])}",
                    )
            if twice.between:
                yield (
                    "warning",
                    f"{count_of(len(twice.between), 'input')} in several splits, such as {' = '.join(twice.between[0][:3])}",
                )
            if twice.conflicts:
                yield "warning", f"{count_of(twice.conflicts, 'group')} of duplicates with different labels"
        for name, facts in self.fields.items():
            if facts.not_finite:
                yield "warning", f"{name}: {count_of(facts.not_finite, 'value')} not finite"
        yield from (("warning", text) for text in self.advice)

    def parts(self, cards: Sequence[Card]) -> list[Part]:
        """The sections of the page."""
        split = self.split
        order = "the order of the stream" if not split.sources else f"seed {self.seed}"
        note = (
            f"{self._summary()}. Epoch {self.epoch}, {order}, precision {self.precision}, global batch size "
            f"{self.global_batch_size:,}, {count_of(split.ranks, 'rank')}."
        )
        seen = (
            "The first samples of rank 0 in this epoch, as the training gets them: after crop, augmentation and mixing."
        )
        if any(card.pictures for card in cards):
            seen += (
                " A stored picture is the file, turned by its EXIF orientation. Seen pictures are not normalised yet."
            )
        if any(picture.boxes for card in cards for picture in card.pictures):
            seen += f" Boxes are drawn as {self.looks.boxes} (--boxes)."
        return [
            Part("", note, list(self.findings()) + [("note", text) for text in self.notes]),
            Part("Samples", seen, cards=cards),
            Part("Fields", self._cost(), tables=[self._field_table()]),
            *self._label_parts(),
            *self._size_parts(),
            *self._duplicate_parts(),
            *self._bad_parts(),
        ]

    def lines(self) -> list[str]:
        """The summary for a terminal."""
        fields = [f"{name} {it.transfer_dtype} {list(it.shape)}" for name, it in self.fields.items()]
        return [
            f"{self.split.name}: {self._summary()}",
            f"fields: {', '.join(fields)}; {self._cost()}",
            *(f"{level}: {text}" for level, text in self.findings()),
            *(f"note: {text}" for text in self.notes),
        ]

    def _summary(self) -> str:
        return self.split.loader.source.summary().replace("\n", "; ")

    def _cost(self) -> str:
        sent = sum(it.bytes_per_sample or 0 for it in self.fields.values())
        return (
            f"{sent:,} bytes per sample to the device, {size_text(sent * self.global_batch_size)} per step, "
            f"{size_text(sent * self.split.num_samples)} per epoch"
        )

    def _field_table(self) -> Table:
        rows = []
        for name, it in self.fields.items():
            cost = "" if it.bytes_per_sample is None else f"{it.bytes_per_sample:,}"
            low_high = "" if it.range is None else f"{format_number(it.range[0])} to {format_number(it.range[1])}"
            spread = "" if it.mean is None else f"{it.mean:.4g} ± {it.std:.4g}"
            shape = " x ".join(map(str, it.shape))
            rows.append([name, it.role, it.dtype, it.transfer_dtype, shape, cost, low_high, spread])
        heading = ["field", "role", "stored", "transfer dtype", "shape", "bytes per sample", "range", "mean ± std"]
        return Table(heading, rows, numbers=(5,), caption="Values as workers send them, of the samples shown.")

    def _label_parts(self) -> Iterator[Part]:
        tables = []
        for name, labels in self.labels.get(self.split.name, {}).items():
            counts = labels.counts()
            of_rank = {} if self.share is None else labels.counts(self.share)
            others = {
                split: of[name].counts() for split, of in self.labels.items() if split != self.split.name and name in of
            }
            classes = sorted({*counts, *(label for of in others.values() for label in of)})
            most = max(counts.values(), default=1)
            shown = classes[:_MOST_CLASSES]
            rows = [
                [
                    self.looks.class_name(label),
                    f"{counts.get(label, 0):,}",
                    *([f"{of_rank.get(label, 0):,}"] if self.share is not None else []),
                    *(f"{of.get(label, 0):,}" for of in others.values()),
                    format_percent(counts.get(label, 0) / max(1, len(labels.values))),
                ]
                for label in shown
            ]
            ranks = [f"rank 0 of {self.split.ranks}"] if self.share is not None else []
            heading = [name, self.split.name, *ranks, *others, "share"]
            more = f" The first {len(shown)} of {len(classes):,} classes." if len(shown) < len(classes) else ""
            caption = f"{len(labels.values):,} of {self.split.num_samples:,} samples were counted.{more}"
            shares = [counts.get(label, 0) / most for label in shown]
            tables.append(Table(heading, rows, range(1, len(heading)), shares, caption))
        if tables:
            yield Part("Labels", tables=tables)

    def _size_parts(self) -> Iterator[Part]:
        if self.sizes is None:
            return
        every = self.sizes.every
        rows = [
            [ext, *(f"{size:,}" for size in (low, middle, high)), size_text(total), f"{absent:,}"]
            for ext, (low, middle, high, total, absent) in self.sizes.fields.items()
        ]
        heading = ["member", "smallest (bytes)", "median", "largest", "all", "samples without it"]
        ends = [[f"largest: {key}", f"{size:,}"] for key, size in self.sizes.largest]
        ends += [[f"smallest: {key}", f"{size:,}"] for key, size in self.sizes.smallest]
        if self.sizes.largest[0][1] == self.sizes.smallest[0][1]:
            ends = []  # all samples are of one size
        counts, shards, of = self.extensions
        members = [[f".{ext}", f"{count:,}"] for ext, count in [*counts.items()][:_MOST_EXTENSIONS]]
        caption = f"Members of all extensions, in {shards:,} of {of:,} shards."
        yield Part(
            "Sizes and extensions",
            tables=[
                Table(heading, rows, range(1, 6), caption=f"Of every {every:,}th sample." if every > 1 else ""),
                *([Table(["sample", "bytes"], ends, (1,))] if ends else []),
                Table(["extension", "members"], members, (1,), caption=caption),
            ],
        )

    def _duplicate_parts(self) -> Iterator[Part]:
        if (twice := self.duplicates) is None:
            return
        groups = [("between splits", group) for group in twice.between]
        groups += [(f"within {split}", group) for split, of in twice.within.items() for group in of]
        rows = [[where, ", ".join(group[:4]) + (" ..." if group[4:] else "")] for where, group in groups[:_MOST_GROUPS]]
        looked = " and ".join(_of(each) for each in self.examined)
        note = f"Equal input, byte for byte, in {looked}. {count_of(len(groups), 'group')}."
        yield Part("Exact duplicates", note, tables=[Table(["where", "samples"], rows)] if rows else [])

    def _bad_parts(self) -> Iterator[Part]:
        for each in self.examined:
            rows = [[key, reason] for key, reason in each.bad[:_MOST_BAD]]
            if rows:
                note = f"{count_of(len(each.bad), 'bad sample')} in {_of(each)}. A training masks them (data.max_bad)."
                yield Part(f"Bad samples of {each.split}", note, tables=[Table(["sample", "reason"], rows)])


def _of(examined: Examined) -> str:
    return f"{examined.samples:,} of {examined.of:,} samples of {examined.split}"


def _sizes_to_json(sizes: Sizes) -> dict[str, Any]:
    names = ("smallest", "median", "largest", "all", "samples_without")
    ends = {
        name: [{"key": key, "bytes": size} for key, size in getattr(sizes, name)] for name in ("largest", "smallest")
    }
    return {
        "every": sizes.every,
        "members": {ext: dict(zip(names, each, strict=True)) for ext, each in sizes.fields.items()},
        **ends,
    }
