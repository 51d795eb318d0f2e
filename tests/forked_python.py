"""A ``python`` that starts in no time: its programs are forks of a process that has imported torch and dtrain.

A real start imports them anew, which takes longer than most programs of the tests, and torchrun does so in each of its
processes. The program has its own arguments, current folder, environment, import path, open files, mounts, signals and exit
code. Its process id and session differ from those of the process that was started, and its parent is a process that waits for
it: what a program does when its parent ends has to be tested with the real interpreter. Other command lines than
``python -m MODULE ...``, ``python FILE ...`` and those of processes that multiprocessing spawns start the real interpreter,
and so does a program without standard streams. PYTHONDONTWRITEBYTECODE and PYTHONWARNINGS have no effect.

* The path that ``forked_python`` gives is a script, the *client*. It hands its open files to the *server*, forwards signals,
  and ends as the program ends. ``sys.executable`` of the program is the client, so that the ranks of torchrun are forks, too.
* The server belongs to the process that called ``forked_python``, and ends with it. It has composed a config, so that its
  programs need not read and parse the presets anew (``tests/quick_hydra.py``), and has run nothing else.
* A client that is killed takes its program along.
* A program ends after its threads and its functions of ``atexit``. The interpreter is not finalized, which would copy the
  memory that the program shares with the server: ten times the work of its start. So files that the program has not closed are
  not flushed, and a crash of the finalization is not seen; test_process_group looks for one with real interpreters.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

#: What takes long. DDP imports dynamo. Not torchrun, which calls the entry points of its environment when it is imported.
_IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "PIL.Image"),
    *(f"dtrain.{name}" for name in ("train", "evaluate", "export", "predict", "pack", "launch", "report", "doctor")),
    *("dtrain.replay", "dtrain.models", "dtrain.tasks", "dtrain.data.digits"),
    *("numpy.ma", "numpy.ctypeslib", "multiprocessing.queues"),
)
#: Variables that the server does not see. For the last two multiprocessing would start its processes with other options.
_OF_PROGRAMS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS")
_MOST_FILES = 250  # the kernel passes 253 at once
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@functools.cache
def forked_python() -> str:
    """The path of the client; starts the server at the first call.

    The real interpreter where the system cannot wait for a process and a socket at once (Linux can).
    """
    import shutil
    import subprocess
    import tempfile
    from pathlib import Path

    if not hasattr(os, "pidfd_open"):
        return sys.executable
    # Not a folder of pytest: the address of a socket has at most 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    address, client = str(folder / "socket"), folder / "python"
    here = Path(__file__).resolve()
    client.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(here.parent)!r})\n"
        f"import {here.stem} as forked\nforked.ask({address!r}, {sys.executable!r})\n"
    )
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)  # clients wait here until the server has imported everything
        server = subprocess.Popen(
            [sys.executable, "-m", f"{here.parent.name}.{here.stem}", str(listener.fileno()), str(client)],
            cwd=here.parents[1],
            env={key: value for key, value in os.environ.items() if key not in _OF_PROGRAMS} | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            server.communicate()
            shutil.rmtree(folder)

    atexit.register(end)
    return str(client)


def ask(address: str, executable: str) -> None:
    """The client: has the server fork the program, waits for it and ends with its exit code or signal."""
    arguments = sys.argv[1:]
    unbuffered = arguments[:1] == ["-u"]
    first, *rest = arguments[unbuffered:] or ["-"]
    is_spawned = first == "-c" and rest[1:] == ["--multiprocessing-fork"]
    descriptors = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    has_files = {0, 1, 2}.issubset(descriptors) and len(descriptors) < _MOST_FILES
    if (first.startswith("-") and first != "-m" and not is_spawned) or not has_files:
        os.execv(executable, [executable, *arguments])
    request = {
        "code": rest.pop(0) if is_spawned else None,
        "module": rest.pop(0) if first == "-m" else None,
        "file": first,
        "arguments": rest,
        "unbuffered": unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "descriptors": descriptors,
    }
    mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"+"], [mounts, *descriptors])
        server.sendall(json.dumps(request).encode() + b"\n")
        for number in descriptors:
            if number > 2:
                os.close(number)  # or a reader of a pipe would not see that the program has closed it
        answer = server.makefile()
        pid = int(answer.readline())
        for number in _FORWARDED:
            signal.signal(number, lambda number, frame: _forward(pid, number))
        # A spawned process ends with its parent, but only a program that is a child of it would notice.
        parents = [os.pidfd_open(os.getppid())] if is_spawned else []
        if server not in select.select([server, *parents], [], [])[0]:
            os._exit(1)
        code = int(answer.readline() or 1)
    if code < 0:
        if -code in _FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    with suppress(OSError):  # os.listdir had opened this one itself
        os.fstat(number)
        return True
    return False


def _forward(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Forks for each client until the standard input ends; returns, in the fork, what it has to run."""
    while True:
        ready = select.select([listener, 0], [], [])[0]
        if 0 in ready:
            while _reap():
                pass
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _attend(connection)
        connection.close()
        while _reap():
            pass


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _attend(connection: socket.socket) -> dict[str, Any]:
    """Forks the program, in which this returns, and tells the client how that ends."""
    files = socket.recv_fds(connection, 1, _MOST_FILES)[1]
    if not (line := connection.makefile().readline()):  # the client was killed
        os._exit(0)
    request: dict[str, Any] = json.loads(line)
    if (pid := os.fork()) == 0:
        os.setsid()
        connection.close()
        wanted = request["descriptors"]
        # Above all wanted numbers: a received file may have the number that another one needs.
        mounts, *files = [_moved(file, 1 + max(wanted)) for file in files]
        for file, number in zip(files, wanted, strict=True):
            os.dup2(file, number)
            os.close(file)
        _enter(mounts)
        return request
    for file in files:
        os.close(file)
    with suppress(OSError):  # the client was killed
        connection.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection, ended], [], [])[0]:
        for kill in (os.killpg, os.kill):  # it may not have its group yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):  # the client was killed
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _moved(file: int, least: int) -> int:
    """The file under another number, which is at least ``least``."""
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(file)
    return number


def _enter(mounts: int) -> None:
    """Enters the mount namespace of the client, if it has one of its own."""
    if os.fstat(mounts).st_ino != os.stat("/proc/self/ns/mnt").st_ino:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).setns(mounts, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(mounts)


def _become(request: dict[str, Any], base_path: list[str], client: str) -> None:
    """Runs a module or a file in this process as ``python`` does."""
    import io
    import multiprocessing.spawn
    import runpy

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = request["environment"].get("PYTHONPATH", "")
    module, file = request["module"], os.path.abspath(request["file"])
    first = request["folder"] if module else os.path.dirname(file)
    sys.path[:] = [first, *(os.path.abspath(path) for path in added.split(os.pathsep) if path), *base_path]
    sys.argv[:] = [request["file"], *request["arguments"]]
    sys.executable = client
    multiprocessing.spawn.set_executable(client)
    # The server's were of other kinds of files.
    unbuffered = request["unbuffered"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    output = open(1, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    encoding, _, errors = request["environment"].get("PYTHONIOENCODING", "").partition(":")
    sys.stdout = io.TextIOWrapper(output, encoding or None, errors or None, write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if request["code"]:
        exec(request["code"], {"__name__": "__main__"})
        return
    if not module:
        runpy.run_path(file, run_name="__main__")
        return
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it was imported, and is now run as __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _skip_frozen_frames_in_getmodule() -> None:
    """Makes ``inspect.getmodule`` return None at once for a frame of a frozen module, such as runpy.

    It would search all modules for each of them, and torchrun calls it hundreds of times.
    """
    import inspect

    find = inspect.getmodule

    def getmodule(object: Any, _filename: str | None = None) -> Any:
        frozen = inspect.isframe(object) and object.f_code.co_filename.startswith("<frozen")
        return None if frozen else find(object, _filename)

    inspect.getmodule = getmodule


_exit_code = 0  # of the program; negative: the signal that ends it


def _note_exit_code() -> None:
    """Finds the code with which the interpreter would end because of the exception that is handled now."""
    global _exit_code
    error = sys.exc_info()[1]
    _exit_code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        _exit_code = (error.code or 0) & 0xFF


def _exit() -> None:
    """Ends this process without finalizing the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, also by its reader
            stream.flush()
    if _exit_code < 0:
        signal.signal(-_exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_exit_code)
    os._exit(_exit_code)


def _main() -> None:
    atexit.register(_exit)  # before anything is imported: the first function is called last

    import gc
    import importlib
    import weakref

    from PIL import Image

    from dtrain.config.compose import compose
    from tests.quick_hydra import quick_hydra

    number, client = sys.argv[1:]
    for name in _IMPORTED:
        importlib.import_module(name)
    _skip_frozen_frames_in_getmodule()
    Image.init()  # imports forty formats of images
    base_path = sys.path[1:]
    with quick_hydra():
        compose(lambda composed: None, ["experiment=digits"])
        gc.collect()
        gc.freeze()
        for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch would unregister 170 libraries of operators at the end of each program
        try:
            _become(_serve(socket.socket(fileno=int(number))), base_path, client)
        except BaseException:
            _note_exit_code()
            raise


if __name__ == "__main__":
    _main()
