"""What a run reports: metrics and the places that they go to."""

from dtrain.tracking.console import print_banner
from dtrain.tracking.meter import Meter
from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks, tracker_mode
from dtrain.tracking.status import read_status, write_status

__all__ = [
    "Meter",
    "NullSinks",
    "Sinks",
    "build_sinks",
    "print_banner",
    "read_status",
    "tracker_mode",
    "write_status",
]
