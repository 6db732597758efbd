"""Attempts of a malicious program to escape the sandbox.

Each prints OUT if it succeeds. Text in braces is replaced by values.

None does harm if it succeeds, so they can also be run without a sandbox.
"""

ATTACKS = {
    "read /etc/passwd": "open('/etc/passwd').read()",
    "read a file of the run": "open('{run}/secret.txt').read()",
    "list the run's folder": "os.listdir('{run}')",
    "read it through a symbolic link": "os.symlink('{run}/secret.txt', '/tmp/link-{pid}'); "
    "open('/tmp/link-{pid}').read()",
    "read it through a hard link": "os.link('{run}/secret.txt', '/tmp/hard-{pid}'); "
    "open('/tmp/hard-{pid}').read()",
    "read it through /proc/self/root": "open('/proc/self/root{run}/secret.txt').read()",
    "read it by its handle": "handle = ctypes.create_string_buffer(b'\\x80' + bytes(140)); mount = "
    "ctypes.c_int()\n"
    "called(libc.name_to_handle_at(-100, b'{run}/secret.txt', handle, ctypes.byref(mount), 0))",
    "change a file of the run": "open('{run}/secret.txt', 'a').write(' ')",
    "remove a file of the run": "os.remove('{run}/spare.txt')",
    "make a file next to the run": "open('{run}/new.txt', 'w').write('x')",
    "change a file's mode": "os.chmod('{run}/secret.txt', 0o644)",
    "change a file's times": "os.utime('{run}/secret.txt')",
    "read an inherited variable": "assert 'hunter2' in os.environ.values()",
    "read the variables of the parent": "assert b'PATH=' in open('/proc/{pid}/environ', 'rb').read()",
    "connect to a server (TCP)": "socket.create_connection(('127.0.0.1', {tcp}), 5)",
    "send a message (UDP)": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "connect to a socket of this machine": "socket.socket(socket.AF_UNIX).connect('{unix}')",
    "listen on a port": "socket.create_server(('127.0.0.1', 0))",
    "start a program": "subprocess.run(['/bin/true'], check=True)",
    "start processes endlessly": "children = []\nwhile len(children) < 100:\n    child = os.fork()\n"
    "    if child == 0:\n        time.sleep(1); os._exit(0)\n    children.append(child)",
    "outlive the call": "if os.fork() == 0:\n    os.setsid(); time.sleep(1.5); os._exit(0)",
    "start threads endlessly": "for _ in range(20000): threading.Thread(target=time.sleep, args=(60,), "
    "daemon=True).start()",
    "allocate 4 GB of memory": "kept = [b'x' * 2**26 for _ in range(64)]",
    "allocate memory that stays (shared memory)": "called(libc.shmget(0, 4096, 0o1600))",
    "fill the disk": "file = open('/tmp/big-{pid}', 'wb')\ntry:\n    for _ in range(40): "
    "file.write(bytes(2**20)); file.flush()\n"
    "finally:\n    os.remove('/tmp/big-{pid}')",
    "send the parent a signal": "os.kill({pid}, signal.SIGCONT)",
    "send every process a signal": "os.kill(-1, 0)",
    "trace the parent (ptrace)": "called(libc.ptrace(0x4206, {pid}, None, None)); libc.ptrace(17, {pid}, "
    "None, None)",
    "read the parent's memory": "into = ctypes.create_string_buffer(8); own = (ctypes.c_size_t * 2)(ctypes.addressof(into), 8)\n"
    "other = (ctypes.c_size_t * 2)({address}, 8); called(libc.process_vm_readv({pid}, own, 1, other, 1, 0))",
    "lower the parent's priority": "os.setpriority(os.PRIO_PROCESS, {pid}, "
    "os.getpriority(os.PRIO_PROCESS, {pid}))\n"
    "os.sched_setaffinity({pid}, os.sched_getaffinity({pid}))",
    "get the privileges of a new user namespace": "called(libc.unshare(0x10000000))",
    "mount a file system": "called(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)); libc.umount2(b'/tmp', "
    "2)",
    "write to a descriptor of the parent": "assert [os.write(number, b'x') for number in range(3, 64) if "
    "can_write(number)]",
    "own another process's signals (F_SETOWN)": "fcntl.fcntl(socket.socketpair()[0], fcntl.F_SETOWN, {victim})",
    "own another process's signals (F_SETOWN_EX)": "fcntl.fcntl(socket.socketpair()[0], 15, struct.pack('ii', 1, {victim}))",
    "own another process's signals (FIOSETOWN)": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', {victim}))",
    "choose the signal of a socket (F_SETSIG)": "fcntl.fcntl(socket.socketpair()[0], 10, signal.SIGCONT)",
    "let a socket send signals (O_ASYNC)": "end = socket.socketpair()[0]\n"
    "fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | 0o20000)",
    "let a socket send signals (FIOASYNC)": "fcntl.ioctl(socket.socketpair()[0], 0x5452, struct.pack('i', "
    "1))",
    "send another process a signal": "os.kill({victim}, 0)",
    "take another process's descriptor (pidfd)": "os.pidfd_open({victim})",
    "read another process's command line": "assert b'sleep' in open('/proc/{victim}/cmdline', 'rb').read()",
    "read the variables of all processes of the machine": "assert [found for found in os.listdir('/proc') if found.isdigit() and reads(found)]",
    "leave the process session": "os.setsid()",
    "leave the process group": "os.setpgid(0, 0)",
    "outlive the caller (PR_SET_PDEATHSIG)": "called(libc.prctl(1, 0))",
    "adopt processes (PR_SET_CHILD_SUBREAPER)": "called(libc.prctl(36, 1)); libc.prctl(36, 0)",
    "start a process (clone3)": "order = ctypes.create_string_buffer(bytes(32) + struct.pack('Q', 17) + "
    "bytes(48))\n"
    "if called(libc.syscall(435, order, 88)) == 0: os._exit(0)",
    "become another program": "os.execv(sys.executable, [sys.executable, '-c', 'print(\\'OUT\\')'])",
    "become another program through its descriptor": "os.execve(os.open('/bin/sh', os.O_RDONLY), ['sh', '-c', "
    "'echo OUT'], {{}})",
    "become another program through the loader": "loader = next(line.split()[-1] for line in "
    "open('/proc/self/maps') if '/ld-linux' in line)\n"
    "os.execv(loader, ['ld', '/bin/sh', '-c', 'echo OUT'])",
    "start 2,000 threads with small stacks": "threading.stack_size(32768)\n"
    "for _ in range(2000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "start 2,000 threads on one stack (clone)": "stack = ctypes.create_string_buffer(65536)\n"
    "for _ in range(2000): called(libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), "
    "ctypes.c_void_p(ctypes.addressof(stack) + 60000 & -16), 0x50F00, None))",
    "send a datagram to a socket's path": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '{dgram}')",
    "send a datagram to an abstract socket": "end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]\n"
    "end.connect('\\0{abstract}'); end.send(b'x')",
    "listen on an abstract name": "socket.socketpair()[0].bind('\\0megarl-listens-{pid}')",
    "pass descriptors on": "left, right = socket.socketpair(); socket.send_fds(left, [b'x'], [0])",
    "ask the kernel about the network (netlink)": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "read shared memory of another process": "libc.shmat.restype = ctypes.c_void_p\n"
    "assert libc.shmat({shm}, None, 0x1000) not in (None, 2**64 - 1), 'refused'",
    "look at shared memory of another process": "called(libc.shmctl({shm}, 2, "
    "ctypes.create_string_buffer(256)))",
    "write to a message queue of another process": "called(libc.msgsnd({queue}, "
    "ctypes.create_string_buffer(struct.pack('l', 1) + "
    "b'x'), 1, 0o4000))",
    "read a semaphore of another process": "called(libc.semctl({semaphore}, 0, 12))",
    "make a message queue (POSIX)": "called(libc.mq_open(b'/megarl-{pid}-' + str(os.getpid()).encode(), "
    "0o102, 0o600, None))\n"
    "libc.mq_unlink(b'/megarl-{pid}-' + str(os.getpid()).encode())",
    "make a file in memory (memfd)": "os.memfd_create('x')",
    "grow a pipe": "fcntl.fcntl(os.pipe()[1], 1031, 2**20)",
    "write to the file that is its standard input": "os.pwrite(0, b'x', 0)",
    "make a file of 1 TB with holes": "file = open('/tmp/sparse-{pid}', 'wb')\ntry: "
    "file.truncate(2**40)\nfinally: os.remove('/tmp/sparse-{pid}')",
    "make 1,500 files": "folder = '/tmp/files-{pid}-' + str(os.getpid()); os.mkdir(folder)\n"
    "try:\n    for number in range(1500): open(folder + '/' + str(number), 'w').close()\n"
    "finally:\n    import shutil; shutil.rmtree(folder)",
    "lock a file of the library": "fcntl.flock(open(os.__file__), fcntl.LOCK_EX)",
    "watch files (inotify)": "called(libc.inotify_init1(0))",
    "read an installed package": "open('{package}').read()",
    "list the installed packages": "os.listdir('{packages}')",
    "list /usr/local": "os.listdir('/usr/local')",
    "list the root folder": "os.listdir('/')",
    "read a file of /etc": "open('/etc/hostname').read()",
    "read the program that starts it": "open('{code}').read()",
    "write to its own memory through /proc": "open('/proc/self/mem', 'r+b')",
    "raise its own limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "raise its own priority": "os.nice(-5)",
    "change how it is scheduled": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "change the root folder": "os.chroot('/tmp')",
    "change the machine's name": "socket.sethostname(socket.gethostname())",
    "make a device": "os.mknod('/tmp/device-{pid}', 0o20600, os.makedev(1, 3)); "
    "os.remove('/tmp/device-{pid}')",
    "use io_uring": "called(libc.syscall(425, 8, ctypes.create_string_buffer(120)))",
    "handle its own page faults (userfaultfd)": "called(libc.syscall({userfaultfd}, 1))",
    "measure other programs (perf)": "called(libc.syscall({perf_event_open}, "
    "ctypes.create_string_buffer(struct.pack('II', 1, 112) + bytes(104)), "
    "0, -1, -1, 0))",
    "load a program into the kernel (bpf)": "called(libc.syscall({bpf}, 0, "
    "ctypes.create_string_buffer(struct.pack('IIII', 1, 4, 4, 1) + "
    "bytes(56)), 72))",
    "keep a key in the kernel": "called(libc.syscall({add_key}, b'user', b'megarl-{pid}', b'x', 1, -2))",
    "use the system call numbers of another ABI (x32)": "called(libc.syscall(0x40000000 | 39))",
    "compute forever": "while True: pass",
    "sleep forever": "time.sleep(3600)",
    "print endlessly": "while True: print('x' * 4096, flush=True)",
}
# System calls that a kernel may not have or may refuse to all users.
OF_KERNEL = {
    "use io_uring",
    "handle its own page faults (userfaultfd)",
    "measure other programs (perf)",
    "load a program into the kernel (bpf)",
    "keep a key in the kernel",
    "use the system call numbers of another ABI (x32)",
    "make a message queue (POSIX)",
}
OF_ROOT = {  # that only root could do without a sandbox
    "get the privileges of a new user namespace",
    "mount a file system",
    "trace the parent (ptrace)",
    "read the parent's memory",
    "raise its own limits",
    "raise its own priority",
    "change the root folder",
    "change the machine's name",
    "make a device",
}
BY_LIMITS = ("compute forever", "sleep forever", "print endlessly")  # these do not end by themselves

HEAD = """
import ctypes, fcntl, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return result
def reads(process):
    try:
        return b'hunter2' in open(f'/proc/{process}/environ', 'rb').read()
    except OSError:
        return False
def can_write(number):
    try:
        import stat
        return stat.S_ISFIFO(os.fstat(number).st_mode) or stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
"""
END = "\nprint('OUT', flush=True)\nos._exit(0)\n"
