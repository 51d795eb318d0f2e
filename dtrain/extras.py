"""The extras of dtrain: the packages of each, and the command that a message names when one is missing."""

from __future__ import annotations

from importlib.util import find_spec

#: By extra: its packages, as they are imported. ``pyproject.toml`` has their versions.
EXTRAS: dict[str, tuple[str, ...]] = {
    "demo": ("sklearn",),
    "s3": ("s3fs",),
    "http": ("aiohttp",),
    "hf": ("huggingface_hub",),
    "text": ("tiktoken", "tokenizers"),
    "media": ("torchcodec",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "optuna": ("optuna",),
    "metrics": ("torchmetrics",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}


def install_command(extra: str) -> str:
    """The command that installs an extra; also where dtrain itself was installed from a checkout.

    Example:
        >>> install_command("hf")
        "pip install 'dtrain[hf]'"
    """
    return f"pip install 'dtrain[{extra}]'"


def extra_of(package: str) -> str | None:
    """The extra that installs a package; None if there is none."""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def is_installed(extra: str) -> bool:
    """Whether all packages of an extra are installed. Imports none of them."""
    return all(find_spec(package) is not None for package in EXTRAS[extra])


def require(extra: str, what: str) -> None:
    """Refuses the use of an extra that is not installed.

    Args:
        extra: Its name.
        what: What needs it, such as a key of the config.

    Raises:
        ModuleNotFoundError: With the command that installs it.
    """
    if not is_installed(extra):
        raise ModuleNotFoundError(
            f"{what} needs the extra {extra}, which is not installed. Run: {install_command(extra)}"
        )
