"""Programs that try to leave the sandbox, to exhaust it, or to forge a verdict.

An escape prints "LEAK" and what it reached. A forgery has a function `solve`, whose tests expect a secret.
"""

TRY = """
import os, sys, time, signal, socket, threading, ctypes, ctypes.util
libc = ctypes.CDLL(None, use_errno=True)


def leak(what, *details):
    print("LEAK", what, *map(str, details), flush=True)


def attempt(what, function, *arguments):
    try:
        result = function(*arguments)
    except BaseException as error:
        return None
    leak(what, repr(result)[:200])
    return result


def read(path):
    with open(path, "rb") as file:
        return file.read(400)


def write(path):
    with open(path, "w") as file:
        return file.write("x")


def refused(what, number, *arguments):
    # The filter answers EPERM whatever the other arguments are; the call itself would find another mistake in them.
    ctypes.set_errno(0)
    if libc.syscall(number, *arguments) != -1 or ctypes.get_errno() != 1:
        leak(what, number, ctypes.get_errno())


def interpreter():
    return os.open(os.__file__, os.O_RDONLY)
"""

ESCAPES = {
    "reads_password_file": "attempt('passwd', read, '/etc/passwd')\nattempt('shadow', read, '/etc/shadow')",
    "reads_the_hidden_file": "attempt('canary', read, CANARY)\nattempt('list', os.listdir, os.path.dirname(CANARY))",
    "reads_by_parent_folders": "attempt('canary', read, '/..' * 9 + CANARY)",
    "reads_through_a_symlink": "attempt('link', os.symlink, CANARY, '/tmp/link')\nattempt('canary', read, '/tmp/link')",
    "reads_home_and_repository": "for folder in ('/home', '/work', '/mnt', '/srv', '/opt', '/var', '/etc', '/boot'):\n"
    "    attempt(folder, os.listdir, folder)",
    "reads_the_environment": "if dict(os.environ): leak('environ', dict(os.environ))\n"
    "for p in ('self', '1', str(os.getppid())): attempt('environ', read, f'/proc/{p}/environ')",
    "reads_environment_in_memory": "environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\n"
    "names = []\n"
    "while environ and environ[len(names)]: names.append(environ[len(names)])\n"
    "if any(b'COVEY' in name for name in names): leak('environ', names)",
    "reads_other_processes": "for p in range(1, 3000):\n"
    "    if p != os.getpid(): attempt('cmdline', read, f'/proc/{p}/cmdline')",
    "reads_installed_packages": "import importlib.util\n"
    "sys.path += [f'{p}/site-packages' for p in sys.path]\n"
    "for name in ('torch', 'numpy', 'pip', 'covey'):\n"
    "    if importlib.util.find_spec(name): leak(name)",
    "connects_to_the_host": "attempt('connect', lambda: socket.create_connection(('127.0.0.1', PORT), 1))",
    "connects_outside": "for host in ('1.1.1.1', '8.8.8.8', '10.0.2.2'):\n"
    "    attempt('connect', lambda: socket.create_connection((host, 53), 0.2))",
    "sends_udp": "def send():\n    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "    return s.sendto(b'x', ('1.1.1.1', 53))\nattempt('udp', send)",
    "resolves_names": "attempt('dns', socket.gethostbyname, 'example.com')",
    "connects_to_unix_sockets": "def unix(path):\n    s = socket.socket(socket.AF_UNIX)\n    return s.connect(path)\n"
    "for p in (UNIX, '/run/dbus/system_bus_socket', '/var/run/docker.sock', '\\0abstract'): attempt(p, unix, p)",
    "listens": "def serve():\n    s = socket.socket()\n    s.bind(('0.0.0.0', 0))\n    s.listen()\n"
    "    return s.getsockname()\nattempt('listen', serve)",
    "opens_raw_sockets": "attempt('raw', socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)\n"
    "attempt('packet', socket.socket, getattr(socket, 'AF_PACKET', 17), socket.SOCK_RAW, 768)",
    "makes_namespaces": "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x10000000 | 0x20000):\n"
    "    if libc.unshare(flag) == 0: leak('unshare', flag)",
    "clones_into_a_namespace": "if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) > 0: leak('clone')\n"
    "if libc.syscall(435, 0, 0) >= 0: leak('clone3')",
    "traces_processes": "for p in (1, os.getppid()):\n"
    "    if libc.ptrace(16, p, 0, 0) == 0 or libc.ptrace(0x4206, p, 0, 0) == 0: leak('ptrace', p)",
    "reads_memory_of_others": "buffer = ctypes.create_string_buffer(16)\n"
    "if libc.process_vm_readv(1, buffer, 1, buffer, 1, 0) > 0: leak('process_vm_readv')\n"
    "attempt('mem', read, '/proc/1/mem')",
    "mounts": "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: leak('mount')\n"
    "if libc.umount2(b'/', 2) == 0: leak('umount')",
    "changes_root": "attempt('chroot', os.chroot, '/')",
    "becomes_root": "for call in (os.setuid, os.seteuid, os.setgid):\n"
    "    before = os.getresuid(), os.getresgid()\n"
    "    try: call(0)\n"
    "    except OSError: continue\n"
    "    if (os.getresuid(), os.getresgid()) != before: leak('root')",
    "signals_the_parent": "for p in (PARENT, os.getppid()):\n    if p > 1: attempt('kill', os.kill, p, 0)",
    "limits_the_parent": "import resource\nattempt('prlimit', resource.prlimit, PARENT, resource.RLIMIT_NOFILE)",
    "slows_the_parent": "attempt('nice', os.setpriority, os.PRIO_PROCESS, PARENT, 0)\n"
    "attempt('affinity', os.sched_setaffinity, PARENT, {0})",
    "changes_metadata": "for path in (CANARY, '/', os.__file__):\n    attempt('chmod', os.chmod, path, 0o644)\n"
    "    attempt('utime', os.utime, path)\n    attempt('xattr', os.setxattr, path, 'user.x', b'x')",
    "signals_everyone": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nattempt('kill', os.kill, -1, 15)",
    "writes_files": "for folder in ('/', '/tmp', '/var/tmp', '/dev/shm', '/run', os.path.dirname(CANARY), '.', "
    "os.path.dirname(os.__file__)):\n    attempt(folder, write, os.path.join(folder, 'x'))",
    "changes_the_interpreter": "attempt('unlink', os.unlink, os.__file__)\nattempt('write', write, sys.executable)",
    "makes_devices": "attempt('mknod', os.mknod, '/tmp/disk', 0o60666, os.makedev(8, 0))",
    "opens_devices": "for name in ('sda', 'vda', 'mem', 'kmsg', 'tty', 'console', 'fuse', 'kvm', 'net/tun'):\n"
    "    attempt(name, lambda: os.open(f'/dev/{name}', os.O_RDWR))",
    "starts_programs": "import subprocess\nfor p in ('/bin/sh', '/usr/bin/env', '/bin/ls', '/usr/bin/bwrap'):\n"
    "    attempt(p, subprocess.run, [p])",
    "raises_its_limits": "import resource as r\nfor kind in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NPROC):\n"
    "    before = r.getrlimit(kind)\n"
    "    try: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY))\n"
    "    except (ValueError, OSError): continue\n"
    "    if r.getrlimit(kind) != before: leak('limit', kind)",
    "uses_inherited_descriptors": "for d in range(3, 256):\n    attempt(d, os.fstat, d)",
    "makes_shared_memory": "if libc.shmget(0, 1 << 20, 0o1600) >= 0: leak('shmget')\n"
    "attempt('memfd', os.memfd_create, 'x')",
    "uses_the_keyring": "if libc.syscall(250, 0, -3, 1) > 0: leak('keyctl')",
    "uses_io_uring": "if libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0: leak('io_uring')",
    "changes_the_clock": "attempt('clock', time.clock_settime, time.CLOCK_REALTIME, 0)",
    "changes_the_host_name": "attempt('name', socket.sethostname, 'other')",
    "reads_its_own_process_files": "for name in ('mem', 'environ', 'root' + CANARY):\n"
    "    attempt(name, read, f'/proc/self/{name}')\n"
    "for path in ('/proc/1/root' + CANARY, f'/proc/{PARENT}/environ', f'/proc/{PARENT}/root' + CANARY):\n"
    "    attempt(path, read, path)\n"
    "for path in ('/proc/self/fd', '/proc/sys', '/sys', '/dev'): attempt(path, os.listdir, path)",
    "opens_sockets_of_other_families": "for family in (38, 40, 31, 29, 44):\n"
    "    attempt(family, socket.socket, family, socket.SOCK_RAW)",
    "watches_files_of_the_host": "d = libc.inotify_init1(0)\n"
    "for path in (CANARY, os.path.dirname(CANARY), '/tmp'):\n"
    "    if libc.inotify_add_watch(d, path.encode(), 0xFFF) >= 0: leak('inotify', path)\n"
    "    attempt('xattr', os.listxattr, path)",
    "lists_network_interfaces": "def others(): return [i for i in socket.if_nameindex() if i[1] != 'lo'] or 1 / 0\n"
    "attempt('interfaces', others)",
    "talks_to_itself_on_loopback": "def loop():\n    with socket.create_server(('127.0.0.1', 0)) as server:\n"
    "        return socket.create_connection(server.getsockname(), 1)\nattempt('loop', loop)",
    "connects_to_an_abstract_socket": "def unix():\n    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
    "    return s.connect(ABSTRACT)\nattempt('abstract', unix)",
    "attaches_shared_memory_of_the_host": "libc.shmat.restype = ctypes.c_void_p\n"
    "address = libc.shmat(SEGMENT, None, 0o10000)\n"
    "if address not in (None, ctypes.c_void_p(-1).value): leak('shmat', ctypes.string_at(address, 18))\n"
    "if libc.shmctl(SEGMENT, 2, ctypes.create_string_buffer(256)) == 0: leak('shmctl')",
    "signals_the_parent_by_other_calls": "info = ctypes.create_string_buffer(128)\n"
    "info[8:12] = (-1).to_bytes(4, 'little', signed=True)\n"
    "for name, call in (('tkill', (200, PARENT, 0)), ('tgkill', (234, PARENT, PARENT, 0)), "
    "('sigqueue', (129, PARENT, 0, info)), ('tgsigqueue', (297, PARENT, PARENT, 0, info))):\n"
    "    if libc.syscall(*call) == 0: leak(name)\n"
    "attempt('pidfd', lambda: signal.pidfd_send_signal(os.pidfd_open(PARENT), 0))\n"
    "attempt('killpg', lambda: os.killpg(os.getpgid(PARENT), 0))",
    "takes_a_descriptor_of_the_parent": "for d in range(3): attempt('getfd', lambda: "
    "[] if (got := libc.syscall(438, os.pidfd_open(PARENT), d, 0)) >= 0 else 1 / 0)\n"
    "if libc.syscall(312, PARENT, os.getpid(), 0, 0, 0) >= 0: leak('kcmp')",
    "uses_kernel_facilities": "for name, call in (('bpf', (321, 0, ctypes.create_string_buffer(128), 128)), "
    "('userfaultfd', (323, 0)), ('perf', (298, ctypes.create_string_buffer(b'\\1' + b'\\0' * 127), 0, -1, -1, 0)), "
    "('fanotify', (300, 0, 0)), ('syslog', (103, 3, ctypes.create_string_buffer(64), 64)), "
    "('add_key', (248, b'user', b'x', b'y', 1, -3)), ('request_key', (249, b'user', b'x', None, -3)), "
    "('open_tree', (428, -100, b'/', 1)), ('fsopen', (430, b'tmpfs', 0)), ('memfd_secret', (447, 0)), "
    "('mq_open', (240, b'x', 0o102, 0o600, None))):\n"
    "    if libc.syscall(*call) >= 0: leak(name)",
    "makes_links_and_pipes": "for folder in ('/', '/tmp', '/dev/shm', os.path.dirname(CANARY), '.'):\n"
    "    path = os.path.join(folder, 'covey_made')\n"
    "    attempt('link', os.link, CANARY, path)\n    attempt('symlink', os.symlink, '/', path)\n"
    "    attempt('fifo', os.mkfifo, path)\n    attempt('folder', os.mkdir, path)\n"
    "    attempt('tmpfile', os.open, folder, os.O_TMPFILE | os.O_RDWR)\n"
    "attempt('rename', os.rename, CANARY, CANARY + 'x')\nattempt('truncate', os.truncate, CANARY, 0)",
    "opens_a_terminal": "attempt('pty', os.openpty)\nimport fcntl, termios\n"
    "for d in range(3): attempt('TIOCSTI', fcntl.ioctl, d, termios.TIOCSTI, b'x')",
    "raises_its_priority": "attempt('nice', os.nice, -5)\n"
    "attempt('fifo', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))",
    "runs_another_interpreter": "import subprocess\n"
    "for p in ('/proc/self/exe', '/usr/bin/python3', '/bin/python3', '/lib64/ld-linux-x86-64.so.2'):\n"
    "    attempt(p, lambda: subprocess.run([p, '-c', 'open(' + repr(CANARY) + ').read()'], check=True))",
    "connects_by_fast_open": "attempt('fast', lambda: socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', PORT)))\n"
    "attempt('message', lambda: socket.socketpair()[0].sendmsg([b'x'], [], 0x20000000, ABSTRACT))\n"
    "s = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]\n"
    "attempt('datagram', s.sendto, b'x', ABSTRACT)",
    "opens_netlink_sockets": "for protocol in (0, 4, 9, 15):\n"
    "    attempt('netlink', socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, protocol)",
    "changes_attributes_of_files": "import fcntl\n"
    "for request in (0x40086602, 0x80086601, 0x401C5820, 0x801C581F, 0xC0045878, 0x5829):\n"
    "    refused('ioctl', 16, interpreter(), request, ctypes.create_string_buffer(64))\n"
    "for number in (468, 469): refused('file_setattr', number, -100, os.__file__.encode(), None, 0, 0)",
    "leases_and_watches_the_interpreter": "import fcntl\nfolder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)\n"
    "attempt('lease', fcntl.fcntl, interpreter(), 1024, fcntl.F_RDLCK)\n"
    "attempt('dnotify', fcntl.fcntl, folder, 1026, 1)\n"
    "d = libc.inotify_init1(0)\nif d >= 0: leak('inotify')\n"
    "if libc.inotify_add_watch(d, os.__file__.encode(), 0xFFF) >= 0: leak('watch')",
    "locks_the_interpreter": "import fcntl\n"
    "attempt('flock', fcntl.flock, interpreter(), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "attempt('lock', fcntl.lockf, interpreter(), fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
    "lock = __import__('struct').pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)\n"
    "for command in (5, 36, 37): attempt(command, fcntl.fcntl, interpreter(), command, lock)",
    "stalls_the_disk_and_the_cache": "refused('sync', 162)\nattempt('fsync', os.fsync, interpreter())\n"
    "attempt('fadvise', os.posix_fadvise, interpreter(), 0, 0, os.POSIX_FADV_DONTNEED)\n"
    "refused('readahead', 187, interpreter(), 0, 0)\nrefused('cachestat', 451, interpreter(), None, None, 0)",
    "asks_about_the_host": "attempt('link', os.readlink, f'/proc/{PARENT}/exe')\nattempt('space', os.statvfs, '/')\n"
    "attempt('session', os.getsid, PARENT)\nattempt('affinity', os.sched_getaffinity, PARENT)",
    "makes_every_other_call": "for number in UNLISTED: refused('call', number, -1, -1, -1, -1, -1, -1)",
    "changes_its_namespaces": "for name in ('mnt', 'net', 'pid', 'user'):\n"
    "    attempt(name, lambda: 1 / (libc.setns(os.open(f'/proc/{PARENT}/ns/{name}', 0), 0) == 0))\n"
    "attempt('pidfd', lambda: 1 / (libc.setns(os.pidfd_open(PARENT), 0x20000) == 0))",
}

EXHAUSTING = {  # they must end by a limit, at the latest after the time limit
    "loops": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "forks_forever": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks_and_sleeps": "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(100)",
    "starts_threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "takes_memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "takes_memory_in_children": "import os\nos.fork(); os.fork()\nx = []\nwhile True:\n"
    "    try: x.append(bytearray(1 << 24))\n    except MemoryError: pass",
    "prints_forever": "while True: print('x' * 10000)",
    "prints_bytes_forever": "import os\nwhile True: os.write(1, b'\\xff' * 65536)",
    "prints_errors_forever": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "recurses": "def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()",
    "ignores_signals": "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "computes_a_large_power": "print(9 ** 9 ** 9)",
    "matches_a_slow_pattern": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "becomes_a_daemon": "import os, time\nif os.fork():\n    time.sleep(100)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    "while True: time.sleep(1)",
    "restarts_itself_at_the_end": "import atexit, time\natexit.register(time.sleep, 1000)",
    "waits_in_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "stops_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "fills_descriptors": "import os\nwhile True: os.pipe()",
    "kills_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "maps_memory": "import mmap\nx = []\nwhile True:\n    x.append(mmap.mmap(-1, 1 << 24))\n"
    "    for place in range(0, 1 << 24, 4096): x[-1][place] = 1",
    "fills_memory_files": "import ctypes, os\nlibc = ctypes.CDLL(None)\nd = libc.memfd_create(b'x', 0)\n"
    "while True: os.write(d, b'x' * 65536)",
    "fills_the_disk": "import itertools, os\nfor n in itertools.count():\n"
    "    for folder in ('.', '/tmp', '/dev/shm', '/var/tmp'):\n"
    "        try: open(f'{folder}/covey_fill_{n}', 'wb').write(b'x' * (1 << 20))\n        except OSError: pass",
    "makes_a_sparse_file": "import os\nfor folder in ('.', '/tmp', '/dev/shm'):\n"
    "    d = os.open(f'{folder}/covey_sparse', os.O_CREAT | os.O_RDWR)\n    os.ftruncate(d, 1 << 40)",
    "fills_pipes": "import fcntl, os, time\nwhile True:\n    try: r, w = os.pipe()\n"
    "    except OSError: time.sleep(100)\n    fcntl.fcntl(w, 1031, 1 << 20)\n    os.write(w, b'x' * 60000)",
    "kills_its_group": "import os\nos.kill(0, 9)",
    "stops_its_group": "import os, signal\nos.killpg(0, signal.SIGSTOP)",
    "replaces_itself_forever": "import sys\ncode = 'import os, sys; os.execv(sys.executable, [sys.executable, *C])'\n"
    "code = 'C = [\"-S\", \"-c\", sys.argv[1], sys.argv[1]]; '.join(('import sys; ', code))\n"
    "import os\nos.execv(sys.executable, [sys.executable, '-S', '-c', code, code])",
    "hides_its_command_line": "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time\\nwhile True: time.sleep(1)'])\n"
    "time.sleep(100)",
    "clones_beside_itself": "import ctypes, time\nfor _ in range(3): ctypes.CDLL(None).syscall(56, 32785, 0, 0, 0)\n"
    "time.sleep(100)",
    "dumps_its_stack_forever": "import faulthandler\nfaulthandler.dump_traceback_later(0.001, repeat=True)\n"
    "while True: pass",
    "traces_itself": "import sys\ndef trace(*a): return trace\nsys.settrace(trace)\nwhile True: trace()",
    "sets_timers": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
    "signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass",
    "closes_its_pipes_and_sleeps": "import os, time\nos.closerange(0, 3)\ntime.sleep(100)",
    "burns_in_threads": "import threading\ndef f():\n    while True: pass\n"
    "for _ in range(3): threading.Thread(target=f).start()",
    "finalizes_forever": "class C:\n    def __del__(self):\n        while True: pass\nx = C()\nprint(42)",
    "is_nested_too_deeply": "x = " + "(" * 50_000 + ")" * 50_000,
    "prints_without_a_line_end": "import sys\nwhile True: sys.stdout.write('4' * 100_000)",
}

FORGERIES = {  # `solve(x)` must return a secret number that the program cannot know
    "exits_with_0": "import os\nos._exit(0)",
    "exits_by_sys": "import sys\nsys.exit(0)",
    "exits_in_the_call": "import os\ndef solve(x): os._exit(0)",
    "raises_system_exit": "def solve(x): raise SystemExit(0)",
    "equals_everything": "class E:\n    def __eq__(self, other): return True\n    __hash__ = object.__hash__\n"
    "def solve(x): return E()",
    "is_an_int_that_equals_everything": "class E(int):\n    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n    __hash__ = int.__hash__\ndef solve(x): return E(1)",
    "is_a_text_that_equals_everything": "class E(str):\n    def __eq__(self, other): return True\n"
    "    __hash__ = str.__hash__\ndef solve(x): return E('a')",
    "returns_nan": "def solve(x): return float('nan')",
    "returns_infinity": "def solve(x): return float('inf')",
    "returns_true": "def solve(x): return True",
    "returns_none": "def solve(x): return None",
    "prints_a_verdict": "print('{\"passed\": true}')\nprint('passed')\ndef solve(x): print('passed')",
    "writes_frames": "import os, json\n"
    "for m in ({'passed': True}, {'value': True}, {'ready': True}, {'loaded': True, 'passed': True}):\n"
    "    p = json.dumps(m).encode()\n"
    "    for d in range(1, 20):\n"
    "        try: os.write(d, len(p).to_bytes(4, 'big') + p)\n"
    "        except OSError: pass\n"
    "def solve(x): return True",
    "answers_before_it_is_asked": "import os, json\np = json.dumps({'passed': True, 'value': 1}).encode()\n"
    "def solve(x):\n    for d in range(1, 20):\n        try: os.write(d, (len(p).to_bytes(4, 'big') + p) * 9)\n"
    "        except OSError: pass",
    "writes_nonsense": "import os\ndef solve(x):\n    for d in range(1, 20):\n        try: os.write(d, b'\\xff' * 99)\n"
    "        except OSError: pass\n    return 1",
    "writes_nested_json": "import os\np = b'[' * 100000\ndef solve(x):\n    for d in range(1, 20):\n"
    "        try: os.write(d, len(p).to_bytes(4, 'big') + p)\n        except OSError: pass\n    return 1",
    "patches_json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef solve(x): return 1",
    "patches_builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\n"
    "builtins.print = builtins.len = lambda *a: 0\ndef solve(x): return 1",
    "patches_the_harness": "import sys\nm = sys.modules['__main__']\nm.encode = lambda v, d=0: True\n"
    "m._check = lambda *a: None\nm._answer = lambda *a: {'passed': True}\ndef solve(x): return 1",
    "reads_frames": "import sys\ndef solve(x):\n    f, found = sys._getframe(), []\n    while f:\n"
    "        found += [v for v in f.f_locals.values() if isinstance(v, (int, str))] "
    "+ [w for v in f.f_locals.values() if isinstance(v, dict) for w in v.values()]\n        f = f.f_back\n"
    "    return max([v for v in found if type(v) is int], default=1)",
    "searches_all_objects": "import gc\ndef solve(x):\n    found = []\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict): found += [v for v in o.values() if type(v) is int]\n"
    "        if isinstance(o, list): found += [v for v in o if type(v) is int]\n    return max(found, default=1)",
    "searches_arguments": "import sys\ndef solve(x):\n    return ' '.join(sys.orig_argv)",
    "looks_at_the_caller": "import inspect\ndef solve(x):\n    for f in inspect.stack():\n"
    "        if 'expected' in f.frame.f_locals: return f.frame.f_locals['expected']\n    return 1",
    "closes_descriptors": "import os\nos.closerange(0, 20)\ndef solve(x): return 1",
    "duplicates_descriptors": "import os\nfor d in range(3, 20):\n    try: os.dup2(1, d)\n    except OSError: pass\n"
    "def solve(x): return 1",
    "sends_itself_the_input": "import os\nos.dup2(0, 1)\ndef solve(x): return x",
    "forks_an_answer": "import os\ndef solve(x):\n    os.fork()\n    return 1",
    "answers_at_exit": "import atexit\natexit.register(print, 'passed')\ndef solve(x): raise SystemExit",
    "raises_an_assertion_class": "class AssertionError(Exception): pass\ndef solve(x): raise AssertionError('passed')",
    "returns_a_generator": "def solve(x):\n    while True: yield x",
    "returns_an_endless_list": "def solve(x):\n    y = []\n    y.append(y)\n    return y",
    "returns_a_huge_text": "def solve(x): return 'x' * 50_000_000",
    "returns_a_huge_number": "def solve(x): return 10 ** 200_000",
    "returns_colliding_keys": "def solve(x): return {n * (2 ** 61 - 1): n for n in range(1, 3000)}",
    "returns_a_forged_encoding": "def solve(x): return ['int', 'passed']",
    "changes_its_argument": "class L(list):\n    def __len__(self): return 0\ndef solve(x): return L([1, 2])",
    "is_no_python": "def solve(x) return x",
    "has_null_bytes": "def solve(x):\n    return 1\0",
    "is_empty": "",
    "is_not_a_function": "solve = 7",
    "defines_another_name": "def solved(x): return 1",
    "overrides_the_test_names": "def check(candidate): pass\ncandidate = solve = lambda x: True\nexpected = True",
    "claims_another_class": "class E:\n    __class__ = property(lambda self: int)\n"
    "    __int__ = __index__ = lambda self: 7\ndef solve(x): return E()",
    "is_a_number_with_other_methods": "class E(float):\n    hex = __float__ = __repr__ = lambda *a: '0x1p3'\n"
    "    real = property(lambda self: E())\n"
    "class C(complex):\n    real = imag = property(lambda self: E())\ndef solve(x): return [E(), C()][x == 3]",
    "is_a_list_with_other_methods": "class E(list):\n    __iter__ = lambda self: iter([7] * 10 ** 9)\n"
    "    __len__ = lambda self: 1\ndef solve(x): return E([x])",
    "stops_the_iteration": "def solve(x): raise StopIteration",
    "raises_an_odd_exception": "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\n"
    "E.__name__ = 'AssertionError\\n{\"passed\": true}'\ndef solve(x): raise E",
    "raises_a_huge_text": "def solve(x): raise ValueError('x' * 50_000_000)",
    "raises_itself": "def solve(x):\n    error = ValueError()\n    error.__cause__ = error.__context__ = error\n"
    "    raise error",
    "has_a_representation_without_end": "class E:\n    def __repr__(self): return 'x' * 10 ** 9\n"
    "    __str__ = __repr__\ndef solve(x): return E()",
    "returns_a_coroutine": "async def solve(x): return x",
    "returns_the_module": "import sys\ndef solve(x): return sys.modules['__main__']",
    "returns_surrogate_keys": "def solve(x): return {'\\udfff': 1, '\\0': 2, 'value': True, 'passed': True}",
    "replaces_itself": "import os, sys\ndef solve(x):\n    os.execv(sys.executable, [sys.executable, '-S', '-c', "
    '\'import os; p = b\\\'{"value": true, "passed": true}\\\'; [os.write(d, len(p).to_bytes(4, "big") + p) '
    "for d in (1, 4)]'])",
    "writes_later_in_a_thread": 'import os, threading, time\np = b\'{"value": true, "passed": true}\'\n'
    "def later():\n    for _ in range(200):\n        time.sleep(0.001)\n        for d in range(3, 9):\n"
    "            try: os.write(d, len(p).to_bytes(4, 'big') + p)\n            except OSError: pass\n"
    "threading.Thread(target=later, daemon=True).start()\ndef solve(x):\n    time.sleep(0.05)\n    return 1",
    "sends_a_frame_without_end": "import os\ndef solve(x):\n    for d in range(3, 9):\n"
    "        try: os.write(d, (1 << 19).to_bytes(4, 'big') + b' ' * 99)\n        except OSError: pass\n    os._exit(0)",
    "sends_odd_json": "import os\nn = iter(range(9))\n"
    "texts = [b'{\"value\": NaN}', b'{\"value\": ' + b'9' * 5000 + b'}', b'[]',\n"
    'b\'{"error": [[], {}]}\', b\'{"value": ["dict", [["list"], 1]]}\', b\'null\']\n'
    "def solve(x):\n    p = texts[next(n) % 6]\n    for d in range(3, 9):\n"
    "        try: os.write(d, len(p).to_bytes(4, 'big') + p)\n        except OSError: pass\n    return 1",
    "exits_in_a_signal_handler": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ndef solve(x):\n    while True: pass",
    "patches_the_encoder": "import sys, os\nm = sys.modules['__main__']\n"
    "m._chunks = m.os.write = m.memoryview = m._send = lambda *a: 0\ndef solve(x): return 1",
    "is_surrogates": "def solve(x): return '\ud800'",
    "is_long": "def solve(x): return 1\n" + "# " + "x" * 5_000_000,
    "prints_surrogates": "print('\\ud800')\ndef solve(x): return '\\ud800'",
}
