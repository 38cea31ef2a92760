"""The child of the Python tool: locks itself in, then runs a program that a model wrote.

Started by tools/python.py as `python jail.py SECONDS MEMORY OUTPUT PARENT READABLE PACKAGES`; the program is read from
standard input. The order is resource limits, Landlock (which files), capabilities, parent-death signal, seccomp (which
system calls). Only then does the child write `locked`, and only after that does it look at the program. A step that
fails ends the child, and the parent refuses output that does not begin with `locked`: nothing ever runs half locked.

What each layer is for. Resource limits bound memory, output and CPU time, but stop neither fork nor root's reads.
Landlock makes a few library folders readable and nothing writable, for root too. The seccomp list leaves out every call
that makes a process, a socket or a signal and every way to open a file for writing, so that the first version of
Landlock (Linux 5.13), which knows neither network nor truncation, is enough.
What is left to the program: which paths exist (stat is not covered), its CPU time and its memory.

Imports are few on purpose: a start costs 10 to 15 ms, and `ast` or `traceback` at the top would add 5 to 8 ms.
"""
import ctypes
import os
import resource
import site
import struct
import sys

ALLOWED = """
    read write readv writev pread64 pwrite64 lseek close close_range dup dup2 dup3 pipe pipe2 fadvise64
    stat fstat lstat newfstatat statx access faccessat faccessat2 statfs fstatfs
    getdents getdents64 getcwd chdir readlink readlinkat umask
    mmap munmap mremap mprotect madvise brk
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2
    futex set_robust_list rseq membarrier sched_yield sched_getaffinity getcpu arch_prctl
    gettid getpid getppid getpgrp getuid geteuid getgid getegid getgroups getresuid getresgid
    uname sysinfo getrlimit getrusage times getrandom
    time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep getitimer setitimer alarm pause
    restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait sigaltstack
    exit exit_group""".split()

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446         # Landlock's calls, the same on every architecture
READ_FILE, READ_DIR = 1 << 2, 1 << 3
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026       # libseccomp's actions
LESS_OR_EQUAL, EQUAL, MASKED_EQUAL = 3, 4, 7                    # libseccomp's comparisons

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, failure: str) -> int:
    if result < 0:
        sys.exit(f"{failure} ({os.strerror(ctypes.get_errno())})")
    return result


def within(what: int, limit: int) -> int:
    """The limit, or the one that holds already where that is lower: an ordinary user cannot raise it."""
    ceiling = resource.getrlimit(what)[1]
    return limit if ceiling == resource.RLIM_INFINITY else min(limit, ceiling)


def limit_resources(cpu_seconds: int, memory: int, output: int) -> None:
    """Seconds of CPU (SIGXCPU, a second later SIGKILL), bytes of address space, bytes of output; a low priority."""
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")                                         # the first to go when the machine is short of memory
    os.nice(10)
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "no PR_SET_DUMPABLE")    # RLIMIT_CORE does not stop a core *pipe*
    for what, soft, hard in ((resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1), (resource.RLIMIT_AS, memory, memory),
                             (resource.RLIMIT_FSIZE, output, output), (resource.RLIMIT_NOFILE, 64, 64),
                             (resource.RLIMIT_CORE, 0, 0), (resource.RLIMIT_MEMLOCK, 0, 0)):
        resource.setrlimit(what, (within(what, soft), within(what, hard)))


def landlock(readable: list[str]) -> None:
    """From here on: files under `readable` can be read; nothing can be written, run, made, moved or removed."""
    version = check(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1),
                    "this kernel has no Landlock; Linux 5.13 or later with Landlock switched on is needed")
    file_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)         # how many this version knows of
    denied = struct.pack("=QQQ", (1 << file_rights) - 1, 3, 3)          # files; TCP; abstract sockets and signals
    denied = denied[:8 if version < 4 else 16 if version < 6 else 24]
    ruleset = check(libc.syscall(CREATE_RULESET, denied, ctypes.c_size_t(len(denied)), 0), "no ruleset")
    for path in filter(os.path.exists, readable):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE, fd)
        check(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"no Landlock rule for {path}")
        os.close(fd)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no PR_SET_NO_NEW_PRIVS")
    check(libc.syscall(RESTRICT_SELF, ruleset, 0), "Landlock could not be switched on")
    os.close(ruleset)


def drop_capabilities() -> None:
    check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capabilities could not be dropped")


def die_with(parent: int) -> None:
    """SIGKILL for this process when the *thread* that started it ends; tools.python.run waits for us in that thread.

    So a pool's worker can go once its call has returned, and a program never outlives the trainer."""
    check(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "no PR_SET_PDEATHSIG")
    if os.getppid() != parent:                                  # it died before the line above
        sys.exit("the parent has gone")


class Comparison(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def seccomp() -> None:
    """From here on: the calls in ALLOWED, files opened for reading, threads but no processes, little else."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        sys.exit("libseccomp.so.2 is missing; install libseccomp2 (Debian, Ubuntu) or libseccomp (Fedora, Arch)")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(EPERM))

    def rule(action, name, *comparisons):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:                                        # newer than this libseccomp: stays denied
            return
        error = library.seccomp_rule_add_array(context, action, number, len(comparisons),
                                               (Comparison * len(comparisons))(*comparisons))
        if error and error != -33:                              # EDOM: not a call of this architecture
            sys.exit(f"no seccomp rule for {name} ({os.strerror(-error)})")

    for name in ALLOWED:
        rule(ALLOW, name)
    for name, flags in (("open", 1), ("openat", 2)):            # Landlock overlooks /proc/self/fd/1 and, once, O_TRUNC
        rule(ALLOW, name, Comparison(flags, MASKED_EQUAL, WRITING, 0))
    rule(ALLOW, "clone", Comparison(0, MASKED_EQUAL, CLONE_THREAD, CLONE_THREAD))
    rule(ENOSYS, "clone3")                                      # its flags lie in memory; glibc falls back to clone
    rule(ALLOW, "prlimit64", Comparison(0, EQUAL, 0))           # pid 0 is oneself
    for request in (0x5401, 0x5413, 0x541B, 0x5451):            # TCGETS, TIOCGWINSZ, FIONREAD, FIOCLEX
        rule(ALLOW, "ioctl", Comparison(1, EQUAL, request))
    rule(ALLOW, "fcntl", Comparison(1, LESS_OR_EQUAL, 3))       # not F_SETFL: output stays append-only; not F_SETOWN
    rule(ALLOW, "fcntl", Comparison(1, EQUAL, 1030))            # F_DUPFD_CLOEXEC
    error = library.seccomp_load(context)
    if error:
        sys.exit(f"seccomp could not be switched on ({os.strerror(-error)})")


def execute(code: str) -> None:
    """Runs a program as a fresh __main__ and shows the value of its last expression, as the Python prompt does.

    A traceback holds the program's own frames only. Self-contained: tools/python.py also sends its source to a server.
    """
    import _ast, sys
    module = sys.modules["__main__"] = type(sys)("__main__")
    try:
        tree = compile(code, "<code>", "exec", 0x400)           # ast.PyCF_ONLY_AST
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], _ast.Expr) else []
        exec(compile(tree, "<code>", "exec"), vars(module))
        exec(compile(_ast.Interactive(last), "<code>", "single"), vars(module))
    except SystemExit:
        raise
    except MemoryError:
        sys.exit("killed: memory")
    except BaseException as error:
        BaseException.with_traceback(error, error.__traceback__.tb_next)
        shown = type(error), error, error.__traceback__
        try:
            import linecache, traceback
            linecache.cache["<code>"] = len(code), None, code.splitlines(True), "<code>"
            traceback.print_exception(*shown)
        except BaseException:                                   # the program left nothing to import them with
            sys.__excepthook__(*shown)
        sys.exit(1)


def main() -> None:
    cpu_seconds, memory, output, parent = map(int, sys.argv[1:5])
    readable, packages = ([path for path in paths.split(":") if path] for paths in sys.argv[5:])
    code = sys.stdin.read()
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    limit_resources(cpu_seconds, memory, output)
    landlock(readable)
    drop_capabilities()
    die_with(parent)
    seccomp()
    os.write(1, b"locked\n")
    sys.argv[:] = [""]
    sys.path += packages
    site.setquit()                                              # exit, quit and help, which python -S leaves out
    site.sethelper()
    execute(code)


if __name__ == "__main__":
    main()
