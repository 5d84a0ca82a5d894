"""The seccomp filter of the sandbox: the system calls that a program may make, as a classic BPF program.

An allow list for a single-threaded Python program that computes, prints and keeps files in its own folder.
All else fails with EPERM (calls newer than the list with ENOSYS, so that libraries fall back). No threads, no
processes, no sockets but an unnamed pair, no signal to any other process.
Changing modes, owners and times reports success and does nothing: Landlock does not cover them, and `shutil.copy`
calls them.
"""

from __future__ import annotations

import errno
import platform
import struct

# name:x86-64:aarch64, "-" where the architecture has no such call
ALLOWED = """
    read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222
    mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
    pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:-
    sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233 dup:32:23 dup2:33:-
    pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71
    exit:60:93 uname:63:160 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46
    getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:-
    link:86:- unlink:87:- symlink:88:- readlink:89:- umask:95:166 gettimeofday:96:169 getrlimit:97:163
    setrlimit:160:164 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176
    geteuid:107:175 getegid:108:177 getppid:110:173 getpgrp:111:- getgroups:115:158 getresuid:118:148
    getresgid:120:150 getpgid:121:155 getsid:124:156 rt_sigpending:127:136 rt_sigtimedwait:128:137
    rt_sigsuspend:130:133 sigaltstack:131:132 mknod:133:- statfs:137:43 fstatfs:138:44 getpriority:140:141
    sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
    sched_get_priority_min:147:126 sched_getaffinity:204:123 arch_prctl:158:- set_tid_address:218:96
    futex:202:98 time:201:- getdents64:217:61 clock_gettime:228:113 clock_getres:229:114
    clock_nanosleep:230:115 exit_group:231:94 epoll_create:213:- epoll_wait:232:- epoll_ctl:233:21
    waitid:247:95 wait4:61:260 openat:257:56 mkdirat:258:34 mknodat:259:33 newfstatat:262:79
    unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36 readlinkat:267:78 faccessat:269:48
    pselect6:270:72 ppoll:271:73 set_robust_list:273:99 get_robust_list:274:100 epoll_pwait:281:22
    epoll_create1:291:20 eventfd:284:- eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86
    timerfd_gettime:287:87 dup3:292:24 pipe2:293:59 preadv:295:69 pwritev:296:70 getcpu:309:168
    renameat2:316:276 getrandom:318:278 copy_file_range:326:285 preadv2:327:286 pwritev2:328:287
    statx:332:291 rseq:334:293 close_range:436:436 faccessat2:439:439 membarrier:324:283
    restart_syscall:219:128 execve:59:221 recvfrom:45:207 shutdown:48:210 getsockname:51:204
    getpeername:52:205 getsockopt:55:209
"""
_DOES_NOTHING = """
    chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:-
    fchownat:260:54 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
"""
_CHECKED = """
    kill:62:129 tgkill:234:131 prlimit64:302:261 ioctl:16:29 fcntl:72:25 socketpair:53:199 sendto:44:206
    clone3:435:435
"""
# On a pipe or file: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Never TIOCSTI or FS_IOC_SETFLAGS.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Duplicates, flags, locks. Never F_SETOWN with F_SETSIG, which would send any signal to any process of this user.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
# column above, AUDIT_ARCH_*
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# BPF_LD|W|ABS, JEQ|K, JGE|K, ALU|AND|K, RET|K
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value
_NEWEST = 450  # calls numbered from here on are newer than the list


def supported() -> bool:
    """Whether there is a filter for this machine's architecture."""
    return platform.machine() in _ARCHITECTURES


def _numbers(table: str, column: int) -> dict[str, int]:
    rows = (row.split(":") for row in table.split())
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


def _argument(index: int, high: bool = False) -> Instruction:
    return _LOAD, 0, 0, 16 + 8 * index + 4 * high  # struct seccomp_data, little endian


def _return(action: int) -> Instruction:
    return _RETURN, 0, 0, action


def _one_of(values: tuple[int, ...], refusal: int) -> list[Instruction]:
    """Allow if the loaded word is one of `values`, else return `refusal`."""
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*tests, _return(refusal), _return(_ALLOW)]


def seccomp_filter(pid: int | None) -> bytes:
    """The filter as an array of struct sock_filter.

    pid: the only process that may be signalled; None: any (in a PID namespace of its own).
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    denied = _ERRNO | errno.EPERM
    not_known = _ERRNO | errno.ENOSYS
    signals = [_return(_ALLOW)]
    if pid:
        signals = [_argument(0), *_one_of((pid,), denied)]
    checks = {
        "kill": signals,
        "tgkill": signals,
        "prlimit64": [_argument(0), *_one_of((0,), denied)],
        "ioctl": [_argument(1), *_one_of(_IOCTLS, _ERRNO | errno.ENOTTY)],
        "fcntl": [_argument(1), *_one_of(_FCNTLS, denied)],
        # AF_UNIX and SOCK_STREAM: asyncio wakes its loop with these. A connected pair reaches no other process.
        "socketpair": [
            _argument(0),
            (_EQUAL, 1, 0, 1),
            _return(denied),
            _argument(1),
            (_AND, 0, 0, 0xF),
            *_one_of((1,), denied),
        ],
        "sendto": [  # without an address
            _argument(4),
            (_EQUAL, 1, 0, 0),
            _return(denied),
            _argument(4, high=True),
            *_one_of((0,), denied),
        ],
        "clone3": [_return(not_known)],
    }
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), _return(_KILL), (_LOAD, 0, 0, 0)]
    for table, action in ((ALLOWED, _ALLOW), (_DOES_NOTHING, _ERRNO)):
        for number in _numbers(table, column).values():
            program += [(_EQUAL, 0, 1, number), _return(action)]
    for name, number in _numbers(_CHECKED, column).items():
        program += [(_EQUAL, 0, len(checks[name]), number), *checks[name]]
    program += [(_AT_LEAST, 0, 1, _NEWEST), _return(not_known), _return(denied)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
