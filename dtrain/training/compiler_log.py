"""What ``torch.compile`` could not take, told to whoever switched it on.

* A *break* is a place in the code where a graph ends and Python runs: slower, and only torch's log knows of it.
* A *limit* is hit when a function was compiled so often, for ever new shapes or values, that torch gives up on it.

Both are read from torch's own log, where they have file, line and reason (``TORCH_LOGS=graph_breaks`` shows all of it): the
counters of ``torch._dynamo`` have no place, and ``torch._dynamo.explain`` would compile everything once more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

# Where torch 2.9 to 2.13 log breaks. They are silent unless asked for; the last one warns of limits.
_BREAKS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
_LIMITS = "torch._dynamo.convert_frame"

_BREAK = re.compile(r"in user code at (?P<where>.+:\d+)\nGraph Break Reason: (?P<reason>.*)", re.DOTALL)
_SKIPPED = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIMIT = re.compile(r"hit config\.(?P<limit>\w+) \((?P<times>\d+)\)\s+function: (?P<function>[^\n]+)")
_WHY = re.compile(r"last reason: (?:\d+/\d+: )?(?P<why>[^\n]+?)\s*(?:\(HINT|\n|$)")
_SHOWN = 10
logger = logging.getLogger("dtrain")


class CompilerLog(logging.Handler):
    """Listens to the compiler from its making to ``close``, if anything of the model is compiled; costs nothing if not.

    Args:
        model: The bare model.
        note: Takes a text of a few lines for the user.
    """

    def __init__(self, model: nn.Module, note: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._note = note
        self._breaks: dict[str, str] = {}  # place -> reason
        self._limits: dict[str, str] = {}  # function -> how often, and the last reason
        self._told: set[str] = set()
        self._restore = ExitStack()
        self._graphs_before = 0
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            self._graphs_before = _graphs()
            self._listen()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record of torch's."""
        text = record.getMessage()
        if record.name == _LIMITS:
            if found := _LIMIT.search(text):
                why = _WHY.search(text)
                last = f", the last time because of {' '.join(why['why'].split())}" if why else ""
                self._limits.setdefault(found["function"], f"{found['times']} times ({found['limit']}){last}")
        elif found := _BREAK.search(text):
            self._breaks.setdefault(found["where"], _in_a_line(found["reason"]))
        else:  # a whole function was given up
            places = _SKIPPED.findall(text)
            raised = record.exc_info[1] if record.exc_info else None
            self._breaks.setdefault(":".join(places[-1]) if places else "?", _in_a_line(str(raised or text)))

    def tell(self) -> None:
        """Notes what has come since it was last asked; nothing if there is nothing."""
        for text in self._news():
            logger.info(text)
            self._note(text)

    def close(self) -> None:
        """Tells the rest, and listens no more."""
        self.tell()
        self._restore.close()
        super().close()

    def _listen(self) -> None:
        for name in (*_BREAKS, _LIMITS):
            source = logging.getLogger(name)
            if name != _LIMITS and not source.isEnabledFor(logging.DEBUG):
                self._restore.callback(_set, source, source.level, source.propagate)
                # Heard here, and not printed by torch as well.
                _set(source, logging.DEBUG, False)
            source.addHandler(self)
            self._restore.callback(source.removeHandler, self)

    def _news(self) -> list[str]:
        breaks = {place: reason for place, reason in self._breaks.items() if place not in self._told}
        limits = {function: reason for function, reason in self._limits.items() if function not in self._told}
        self._told |= {*breaks, *limits}
        texts = []
        if breaks:
            lines = [f"    {place}: {reason}" for place, reason in list(breaks.items())[:_SHOWN]]
            more = len(breaks) - len(lines)
            lines += [f"    and {more} more: TORCH_LOGS=graph_breaks shows all"] if more > 0 else []
            count = f"{len(breaks)} graph break{'s' if len(breaks) > 1 else ''}"
            graphs = _graphs() - self._graphs_before
            head = f"train.compile: {count}, {graphs} graphs compiled; what is between them runs uncompiled:"
            texts.append("\n".join([head, *lines]))
        texts += [
            f"train.compile: torch compiled {function} {often}. It gives up: what is new there runs uncompiled. "
            "TORCH_LOGS=recompiles shows every reason."
            for function, often in limits.items()
        ]
        return texts


def _set(source: logging.Logger, level: int, propagate: bool) -> None:
    source.setLevel(level)
    source.propagate = propagate


def _graphs() -> int:
    from torch._dynamo.utils import counters  # imported here: it takes seconds, and only who compiles needs it

    return int(counters["stats"]["unique_graphs"])


def _in_a_line(reason: str) -> str:
    """The title of a break and its explanation: torch adds hints, links and a traceback on lines of their own."""
    head, _, rest = reason.partition("Explanation:")
    titles = [line.strip() for line in head.splitlines() if line.strip() and not line.rstrip().endswith(":")]
    title = titles[-1] if titles else head.strip().splitlines()[0] if head.strip() else "no reason given"
    explanation = rest.strip().splitlines()[0].strip() if rest.strip() else ""
    return f"{title}: {explanation}" if explanation else title
