"""What a confusion table says of each class, against counting pairs of labels."""

from __future__ import annotations

import random

import torch

from dtrain.tracking.per_class import per_class, rest, table, worst_first


def test_each_class_has_its_recall_precision_count_and_worst_confusion() -> None:
    draw = random.Random(0)
    pairs = [(draw.choice("aabbbc"), draw.choice("abbcd")) for _ in range(200)]
    confusion = torch.tensor([[pairs.count((true, said)) for said in "abcd"] for true in "abcd"])
    classes = per_class(confusion, ["ape", "bee", "cat"])
    assert [one.name for one in classes] == ["ape", "bee", "cat", "3"]
    for letter, one in zip("abcd", classes, strict=True):
        own = [said for true, said in pairs if true == letter]
        named = [true for true, said in pairs if said == letter]
        assert one.count == len(own)
        assert one.precision == named.count(letter) / len(named)
        if own:
            assert one.recall == own.count(letter) / len(own)
            others = {other: own.count(other) for other in "abcd" if other != letter}
            assert one.taken == max(others.values())
            assert one.taken_for == classes["abcd".index(max(others, key=lambda other: others[other]))].name


def test_a_class_that_nobody_names_has_no_precision_and_one_without_samples_no_recall() -> None:
    first, second = per_class(torch.tensor([[0, 3], [0, 0]]))
    assert (first.recall, first.taken_for, first.taken) == (0, "1", 3)
    assert first.precision != first.precision
    assert second.recall != second.recall
    assert (second.count, second.precision, second.taken_for) == (0, 0, "")


def test_the_worst_come_first_and_those_that_nobody_reads_are_summed_up() -> None:
    confusion = torch.diag(torch.arange(1, 101))
    confusion[:, 0] += 10
    confusion[50] = 0
    classes = per_class(confusion)
    assert [one.name for one in worst_first(classes)] == [str(n) for n in (*range(1, 50), *range(51, 100), 0)]
    nobody_names_them = per_class(torch.tensor([[0, 0, 9], [0, 0, 5], [2, 0, 6]]))
    assert [one.name for one in worst_first(nobody_names_them)] == ["0", "1", "2"]
    lines = table(classes)
    assert len(lines) == 21
    assert lines[0][:2] == ["class", "samples"]
    assert lines[1] == ["1", "12", "16.67%", "100.00%", "0 (83.3%)"]
    assert rest(classes) == "79 more with a recall from 68.75% to 100.00%, 1 without a sample"
    few = per_class(torch.eye(3, dtype=torch.int64), ["a" * 50, "b", "c"])
    assert rest(few) == ""
    assert table(few)[1] == ["a" * 31 + "…", "1", "100.00%", "100.00%", ""]
