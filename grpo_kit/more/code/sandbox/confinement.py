"""The launcher's confinement of itself and of the programs it starts, by calls to the kernel."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def prctl(option: int, argument: int = 0, pointer=None) -> None:
    """prctl(2). Raises OSError."""
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(argument), pointer or zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def drop_capabilities() -> None:
    """Drops root's powers of a launcher run by root, for itself and all its programs; the user id stays."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the kernel's last one, or not root
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def install_filter(program: bytes) -> None:
    """Install the seccomp filter of syscalls.py, for this process and all its programs."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(
        PR_SET_SECCOMP,
        _SECCOMP_MODE_FILTER,
        ctypes.byref(_FilterProgram(len(program) // 8, program)),
    )


def landlock(python: dict, home: str, work: str, package_folder: str) -> None:
    """Let this process and its programs read the interpreter, write below `work`, and nothing else.

    home: a new folder that becomes the interpreter's home: links to the standard library's entries, since the real
    folder also holds installed packages. package_folder: where sandlock is installed.
    """
    for library in {"lib", python["platlibdir"]}:
        stdlib = os.path.join(home, library, python["version"])
        os.makedirs(stdlib)
        for entry in python["entries"]:
            link = os.path.join(stdlib, os.path.basename(entry))
            if not os.path.lexists(link):
                os.symlink(entry, link)
    sys.path.append(package_folder)
    import sandlock

    sys.path.remove(package_folder)
    readable = [
        home,
        python["executable"],
        *python["entries"],
        *python["libraries"],
        "/etc/ld.so.cache",
    ]
    protection = sandlock.Protection
    sandlock.confine(
        sandlock.Sandbox(
            fs_readable=[path for path in readable if os.path.exists(path)],
            fs_writable=[work, "/dev/null"],
            # On newer kernels only; the filter already closes sockets, device ioctls and signals to others.
            allow_degraded=[
                protection.NET_TCP,
                protection.FS_IOCTL_DEV,
                protection.SIGNAL_SCOPE,
                protection.ABSTRACT_UNIX_SOCKET_SCOPE,
            ],
        )
    )


def bubblewrap(bwrap: str, python: dict, work: str, filter_file: int) -> list[str]:
    """The command before the program's own: new namespaces with the interpreter, /box and /program.py."""
    arguments = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    arguments += ["--cap-drop", "ALL", "--seccomp", str(filter_file)]
    for top in ("/lib", "/lib64"):
        if os.path.islink(top):
            arguments += ["--symlink", os.readlink(top), top]
    stdlib = {os.path.dirname(entry) for entry in python["entries"]}
    readable = {python["executable"], "/etc/ld.so.cache", *stdlib}
    # Mount a library's folder, so that one mount does for dozens, unless installed packages lie below it.
    for library in python["libraries"]:
        folder = os.path.dirname(library)
        beside_packages = any(path.startswith(folder + os.sep) for path in stdlib)
        readable.add(library if beside_packages else folder)
    for path in sorted(readable):  # outer before inner
        if os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    for folder in python["masked"]:
        arguments += ["--tmpfs", folder, "--remount-ro", folder]
    arguments += [
        "--dev-bind",
        "/dev/null",
        "/dev/null",
        "--bind",
        os.path.join(work, "box"),
        "/box",
    ]
    arguments += [
        "--ro-bind",
        os.path.join(work, "program.py"),
        "/program.py",
        "--chdir",
        "/box",
    ]
    return [*arguments, "--remount-ro", "/", "--"]
