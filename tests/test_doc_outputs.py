"""What the pages of a newcomer show as output is what their commands print, run as they are written and not shortened.

<!-- compared -->        before a block of output: it is compared with what the block of code above it prints
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doc_output import missing_lines, same_line
from tests.doc_pages import PAGES, ROOT, WEEK, blocks, run_in_the_week
from tests.doc_world import execute
from tests.forked_python import forked_python


def named(name: str) -> Path:
    return next(page for page in PAGES if page.name == name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("digits")
def test_the_pages_of_a_newcomers_week_show_what_their_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("benchmarks", "examples", "scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the pages are of a laptop
    different = []
    for page in map(named, WEEK):
        for code, outputs in run_in_the_week(page):
            script = f"python - <<'EOF'\n{code.text}EOF\n" if code.language == "python" else code.text
            # As on a terminal.
            script = f'ls() {{ COLUMNS=120 command ls -C "$@"; }}\n{script}'
            printed = execute(script, tmp_path, code.programs, forked_python(), in_full=bool(outputs))
            for output in outputs:
                different += [f"{output}: {line}" for line in missing_lines(output.text, printed)]
    assert different == []


def test_every_page_with_compared_output_is_read_in_the_week() -> None:
    compared = {page.name for page in PAGES if any(block.is_compared for block in blocks(page))}
    assert compared == set(WEEK)


def test_contributing_says_how_many_blocks_are_run_and_compared() -> None:
    code = [block for page in PAGES for block in blocks(page, "bash")]
    outputs = [block for page in PAGES for block in blocks(page, "")]
    whole, partly = (
        sum(block.reason is None for block in code),
        sum(block.runs and block.reason is not None for block in code),
    )
    sentence = (
        f"Of {len(code)} bash blocks, {whole} are run, {partly} without the programs that they name, and "
        f"{len(code) - whole - partly} are not; of {len(outputs)} output blocks, "
        f"{sum(block.is_compared for block in outputs)} are compared."
    )
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert sentence in text, f"write in CONTRIBUTING.md, Documentation: {sentence}"


# -- the comparison


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("loss 0.4958  accuracy 0.95  samples 360", "loss 0.5100  accuracy 0.9472 samples 360"),
        (
            "step 10/92  loss 2.167  719 samples/s  wait 32%  eta 0:02",
            "step 10/92  loss 2.1  3,071.5 samples/s  wait 5%",
        ),
        ("finished at step 92: /home/me/dtrain/runs/mine", "finished at step 92: /tmp/some/world/runs/mine"),
        ("in /home/me/runs/sure-7835434d (new)", "in /var/runs/sure-00112233 (new)"),
        ("classes: 4, other files: 0, 4.6 s", "classes: 4, other files: 0, 12.1 s"),
        ('{"state": "finished", "step": 92, ...}', '{"state": "finished", "step": 92, "time": 1795842183.44, "x": {}}'),
        ("sent 1.5e-3 ... in all", "sent 1.4e-3 by 2 ranks in all"),
        ("a  ...", "a"),
        ("189,660 bytes", "189,796 bytes"),
    ],
)
def test_times_rates_folders_and_rounding_make_no_difference(shown: str, printed: str) -> None:
    assert same_line(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step 92/92  samples 360", "step 92/92  samples 361"),
        ("1,437 samples in 8 shards", "1,436 samples in 8 shards"),
        ("loss 0.4958", "loss 0.6"),
        ("accuracy 0.95", "accuracy 0.85"),
        ("-0.5", "0.5"),
        ("sure 0.15  samples 360", "sure 0.15"),
        ("finished at step 92: /home/me/runs/mine", "finished at step 92: /home/me/runs/other"),
        ('{"state": "finished", ...}', '{"state": "stopped", "step": 92}'),
        ("begin ... end", "begin end?"),
        ("a b ... b c", "a b c"),
        ("loss 0.5", "loss none"),
        ("189,660 bytes", "378,152 bytes"),
    ],
)
def test_other_words_counts_and_values_do(shown: str, printed: str) -> None:
    assert not same_line(shown, printed)


def test_lines_are_found_in_their_order_and_others_may_stand_between() -> None:
    printed = "+ train\nstep 10/30\nstep 20/30\n\neval 23/30\nfinished\n"
    assert missing_lines("step 10/30\n...\neval 23/30\nfinished\n", printed) == []
    (missing,) = missing_lines("finished\nstep 20/30\n", printed)
    assert "'step 20/30'" in missing
    (missing,) = missing_lines("eval 23/31\n", printed)
    assert re.search("'eval 23/31'.*'eval 23/30'", missing)


def test_an_output_belongs_to_the_code_above_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\none\n```\n```\nnot compared\n```\n<!-- not run: slow -->\n```bash\ntwo\n```\n<!-- compared -->\n```\n2\n```\n"
        "<!-- not run: slow -->\n```bash\nthree\n```\n```python\nfour\n```\n<!-- compared -->\n```\n4\n```\n"
        "```bash\nfive\n```\n"
    )
    found = [(code.text, [output.text for output in outputs]) for code, outputs in run_in_the_week(page)]
    assert found == [("one\n", []), ("two\n", ["2\n"]), ("four\n", ["4\n"])]
