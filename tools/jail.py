"""The child process of the Python tool: locks itself in, then runs a program that a model wrote.

    python jail.py SECONDS MEMORY OUTPUT THREADS PARENT USER READABLE...  < program

tools/python.py starts it. The child applies all locks, then writes `locked`, and only then compiles
the program's text. A step that fails ends the child, and the parent refuses output that does not
begin with `locked`, so no program runs with half of the locks. docs/jail.md says what each lock
stops and what stays possible.

The file imports few modules, because a start takes 10 to 15 ms and `ast` or `traceback` would add
5 to 8 ms.

Tests: pytest tests/test_python_tool.py
"""

import _ast
import _thread
import ctypes
import os
import resource
import site
import struct
import sys

ALLOWED = """
    read write readv writev pread64 pwrite64 lseek close close_range dup dup2 dup3
    pipe pipe2 fadvise64
    stat fstat lstat newfstatat statx access faccessat faccessat2 statfs fstatfs
    getdents getdents64 getcwd chdir readlink readlinkat umask
    mmap munmap mremap mprotect madvise brk
    poll ppoll select pselect6
    epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2
    futex set_robust_list rseq membarrier sched_yield sched_getaffinity getcpu arch_prctl
    gettid getpid getppid getpgrp
    getuid geteuid getgid getegid getgroups getresuid getresgid
    uname sysinfo getrlimit getrusage times getrandom
    time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep
    getitimer setitimer alarm pause restart_syscall
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait sigaltstack
    exit exit_group
""".split()

# Landlock's system calls have the same numbers on every architecture.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_VERSION_FLAG = 1
LANDLOCK_PATH_BENEATH = 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522
CLONE_THREAD = 0x10000
F_GETFL = 3
F_DUPFD_CLOEXEC = 1030
HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIOCLEX
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# libseccomp's actions and comparisons.
ALLOW = 0x7FFF0000
EPERM = 0x00050001
ENOSYS = 0x00050026
LESS_OR_EQUAL = 3
EQUAL = 4
MASKED_EQUAL = 7
UNKNOWN_CALL = -1
NOT_OF_THIS_ARCHITECTURE = -33

# No user has a number from here on: systemd, containers and subuid files use lower ones.
FIRST_UNUSED_USER = 0x70000000
MOST_TASKS = 1 << 16
# The ends of the names of package folders. A program may import from such folders.
PACKAGES = ("/site-packages", "/dist-packages")

NOT_PERMITTED = "Sockets (asyncio needs them), writing files and new processes are forbidden here."

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, failure: str) -> int:
    """The result of a C call. An error ends the child."""
    if result < 0:
        sys.exit(f"{failure} ({os.strerror(ctypes.get_errno())})")
    return result


def set_limit(what: int, soft: int, hard: int) -> None:
    """Sets a resource limit, or keeps a lower one: an ordinary user cannot raise a hard limit."""
    ceiling = resource.getrlimit(what)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft = min(soft, ceiling)
        hard = min(hard, ceiling)
    resource.setrlimit(what, (soft, hard))


def limit_resources(cpu_seconds: int, memory: int, output: int) -> None:
    """Limits CPU seconds, bytes of address space, bytes of output, open files; lowers priority."""
    # If the machine runs out of memory, the kernel kills this process first.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(10)
    # The kernel sends SIGXCPU at the soft limit and SIGKILL a second later.
    set_limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
    set_limit(resource.RLIMIT_AS, memory, memory)
    set_limit(resource.RLIMIT_FSIZE, output, output)
    set_limit(resource.RLIMIT_NOFILE, 64, 64)
    set_limit(resource.RLIMIT_CORE, 0, 0)
    set_limit(resource.RLIMIT_MEMLOCK, 0, 0)


def landlock(readable: list[str]) -> None:
    """Allows reading `readable` and no other access to files: no writing, running or removing."""
    version = check(
        libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG),
        "this kernel has no Landlock; Linux 5.13 or later with Landlock switched on is needed",
    )
    denied = denied_rights(version)
    size = ctypes.c_size_t(len(denied))
    ruleset = check(libc.syscall(LANDLOCK_CREATE_RULESET, denied, size, 0), "no ruleset")
    for path in filter(os.path.exists, readable):
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, fd)
        result = libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_PATH_BENEATH, rule, 0)
        check(result, f"no Landlock rule for {path}")
        os.close(fd)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no PR_SET_NO_NEW_PRIVS")
    check(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock could not be switched on")
    os.close(ruleset)


def denied_rights(version: int) -> bytes:
    """Every right that this version of Landlock knows, as the kernel's struct."""
    file_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    denied = [(1 << file_rights) - 1]
    if version >= 4:
        denied.append(3)  # TCP: bind, connect
    if version >= 6:
        denied.append(3)  # abstract sockets, signals
    return struct.pack(f"={len(denied)}Q", *denied)


def drop_privileges(user: str) -> None:
    """Gives up root's user and groups (see `_user` in tools/python.py) and all capabilities.

    The child's user number is made from its process number, so no other program shares it.
    """
    number = FIRST_UNUSED_USER + os.getpid()
    if user == "unused":
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    if user == "counted":
        # The kernel counts threads by the real user and checks file access by the effective one.
        os.setgroups([])
        os.setresuid(number, 0, 0)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    nothing = bytes(24)
    check(libc.capset(header, nothing), "capabilities could not be dropped")
    # RLIMIT_CORE does not stop a core dump into a *pipe*. A change of user resets this flag.
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "no PR_SET_DUMPABLE")


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when the *thread* that started it ends.

    tools/python.py waits for us in that thread, so a program never outlives the trainer.
    A change of user resets this, so it is called after drop_privileges.
    """
    check(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "no PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # it may have died before the line above
        sys.exit("the parent has gone")


def comparison(argument: int, operator: int, a: int, b: int = 0) -> bytes:
    """libseccomp's struct for a condition on one argument of a system call."""
    return struct.pack("=IiQQ", argument, operator, a, b)


def seccomp() -> None:
    """Allows the calls in ALLOWED, opening files for reading, and new threads but no processes."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        sys.exit("libseccomp.so.2 is missing: install libseccomp2 (Fedora, Arch: libseccomp)")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(EPERM))

    def add_rule(action, name, *comparisons):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == UNKNOWN_CALL:  # this libseccomp lacks the call, so it stays denied
            return
        packed = b"".join(comparisons)
        error = library.seccomp_rule_add_array(context, action, number, len(comparisons), packed)
        if error and error != NOT_OF_THIS_ARCHITECTURE:
            sys.exit(f"no seccomp rule for {name} ({os.strerror(-error)})")

    for name in ALLOWED:
        add_rule(ALLOW, name)
    # Landlock does not check /proc/self/fd/1, and its first version does not check O_TRUNC.
    add_rule(ALLOW, "open", comparison(1, MASKED_EQUAL, WRITING, 0))
    add_rule(ALLOW, "openat", comparison(2, MASKED_EQUAL, WRITING, 0))
    add_rule(ALLOW, "clone", comparison(0, MASKED_EQUAL, CLONE_THREAD, CLONE_THREAD))
    # seccomp cannot read the flags of clone3, which are in memory. glibc falls back to clone.
    add_rule(ENOSYS, "clone3")
    add_rule(ALLOW, "prlimit64", comparison(0, EQUAL, 0))  # of this process only
    for request in HARMLESS_IOCTLS:
        add_rule(ALLOW, "ioctl", comparison(1, EQUAL, request))
    # F_SETFL could end the output's append-only mode, and F_SETOWN sends signals: both are denied.
    add_rule(ALLOW, "fcntl", comparison(1, LESS_OR_EQUAL, F_GETFL))
    add_rule(ALLOW, "fcntl", comparison(1, EQUAL, F_DUPFD_CLOEXEC))
    error = library.seccomp_load(context)
    if error:
        sys.exit(f"seccomp could not be switched on ({os.strerror(-error)})")


def limit_threads(threads: int, user: str) -> None:
    """Limits this program to `threads` threads, or to a few hundred if its user is shared.

    The kernel's limit also counts the user's tasks in other containers, and this process cannot see
    their number. So the soft limit is raised until a thread can be started.
    """
    ceiling = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    # A stack of the usual size may not fit into the program's memory.
    _thread.stack_size(1 << 16)
    for limit in range(threads, MOST_TASKS, threads):
        set_limit(resource.RLIMIT_NPROC, limit, ceiling)
        try:
            _thread.start_new_thread(int, ())
        except RuntimeError:
            continue
        _thread.stack_size(0)
        # Other programs of the same user need threads at the same time.
        spare = 4 * threads if user == "shared" else 0
        set_limit(resource.RLIMIT_NPROC, limit + spare, limit + spare)
        return
    sys.exit("no thread could be started")


def execute(code: str) -> None:
    """Runs a program as a new __main__ module and prints the value of its last expression.

    A traceback has the program's own frames only. Modules for tracebacks are imported on a failure.
    """
    only_ast = 0x400  # ast.PyCF_ONLY_AST
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        tree = compile(code, "<code>", "exec", only_ast)
        last = []
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last.append(tree.body.pop())
        exec(compile(tree, "<code>", "exec"), vars(module))
        exec(compile(_ast.Interactive(last), "<code>", "single"), vars(module))
    except SystemExit:
        raise
    except MemoryError:
        sys.exit("killed: memory")
    except BaseException as error:
        # Drops this function's frame. The program's exception may override its own methods.
        BaseException.with_traceback(error, error.__traceback__.tb_next)
        details = type(error), error, error.__traceback__
        try:
            import linecache
            import traceback

            if isinstance(error, PermissionError):
                BaseException.add_note(error, NOT_PERMITTED)
            linecache.cache["<code>"] = len(code), None, code.splitlines(True), "<code>"
            traceback.print_exception(*details)
            # Finalizers such as asyncio's would print a misleading last line.
            sys.stderr = None
        except BaseException:  # the program broke the import system
            sys.__excepthook__(*details)
        sys.exit(1)


def main() -> None:
    cpu_seconds, memory, output, threads, parent = map(int, sys.argv[1:6])
    user = sys.argv[6]
    readable = sys.argv[7:]
    code = sys.stdin.read()
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    limit_resources(cpu_seconds, memory, output)
    landlock(readable)
    drop_privileges(user)
    die_with(parent)
    seccomp()
    limit_threads(threads, user)
    os.write(1, b"locked\n")
    sys.argv[:] = [""]
    sys.path += [path for path in readable if path.endswith(PACKAGES)]
    # These two make exit, quit and help, which python -S leaves out.
    site.setquit()
    site.sethelper()
    execute(code)


if __name__ == "__main__":
    main()
