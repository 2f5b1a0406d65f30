"""The one file's `__main__`: check the interpreter, unpack once, start rvllm. Knows nothing of what it starts.

build_zipapp.py copies this text into the archive as __main__.py with the BUILD line filled in. It keeps to the
syntax of Python 2.7 and 3.6 and imports nothing of ours, so that a wrong interpreter gets one line, not a
traceback. `--version` and `--help` are answered from text made at build time; everything else unpacks, once per
build, Python and user, to the first usable of

    $RVLLM_CACHE
    $XDG_CACHE_HOME/rvllm, or else ~/.cache/rvllm
    $TMPDIR/rvllm-UID, or else /tmp/rvllm-UID           (any but the first choice is said in one warning)

A folder is usable if no other user could change what we load from it, and if it is not mounted noexec. Inside:

    zipapp-UID/                      ours, mode 0700
        unpack.lock                  held while unpacking, cleaning up and pruning
        new-PID-TIME/                being filled, or left behind by a killed run; renamed when complete
        PAYLOAD-cpXY/                a complete build; the three used last are kept
            .files                   size and path of every file; locked (shared) by each process that runs it

Correctness rests on the rename; the locks only save work, so a file system without flock is fine (nothing is then
cleaned up). Exit codes: 78 wrong interpreter or machine, 1 nowhere to unpack or a damaged archive.

No environment variable is set for children. To start rvllm again from inside, run [sys.executable, sys.argv[0]]:
argv[0] is made absolute here. multiprocessing's spawn and forkserver work as they are: they hand on sys.path.
"""

import errno
import os
import sys

# build_zipapp.py replaces the next line: pythons [[major, minor], ...], payload (sha256 of the index), help, version.
BUILD = {}

GLIBC = (2, 28)  # the newest glibc that a bundled library may ask for
KEPT_BUILDS = 3
THREADS = 8  # a thread holds up to three times a part's 8 MiB
OVERFLOW_UID = 65534


class Unusable(Exception):
    """A folder cannot take the unpacked build; str() is the reason."""


# --- Is this the right interpreter on the right machine?


def wrong_python():
    """What this interpreter is that it must not be, or None."""
    if list(sys.version_info[:2]) not in BUILD["pythons"]:
        return "Python %d.%d.%d" % sys.version_info[:3]
    if sys.implementation.name != "cpython":
        return sys.implementation.name
    if "t" in getattr(sys, "abiflags", ""):
        return "a free-threaded Python"
    return None


def wrong_machine():
    """What this system is that it must not be, or None."""
    if not sys.platform.startswith("linux"):
        return sys.platform
    if os.uname()[4] != "x86_64":
        return "a machine of type " + os.uname()[4]
    if sys.maxsize < 2**32:
        return "a 32-bit Python"
    return old_glibc()


def old_glibc():
    """The C library, if it is not glibc or is too old for the bundled libraries; or None."""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
    except (AttributeError, OSError, ValueError):
        return "a system without glibc"
    found = tuple(int(number) for number in version.split(".")[:2])
    return None if found >= GLIBC else name + " " + version


def refuse(found, hint):
    """One line that says what is needed and what this is; exit code 78 (EX_CONFIG)."""
    needs = "CPython %s on Linux x86-64 with glibc %d.%d or newer" % ((" or ".join(minors()),) + GLIBC)
    say("error: this file needs %s, but this is %s (%s). hint: %s" % (needs, found, sys.executable, hint))
    sys.exit(78)


def minors():
    return ["%d.%d" % tuple(python) for python in BUILD["pythons"]]


# --- Where may the build be unpacked?


def candidates():
    """Folders to try, best first; each may still turn out to be unusable."""
    if os.environ.get("RVLLM_CACHE"):
        yield os.path.expanduser(os.environ["RVLLM_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        yield os.path.join(base, "rvllm")
    yield os.path.join(os.environ.get("TMPDIR") or "/tmp", "rvllm-%d" % os.geteuid())


def open_store(candidate):
    """Make our own folder in `candidate` and return its real path; raise Unusable or OSError."""
    store = os.path.join(os.path.abspath(candidate), "zipapp-%d" % os.geteuid())
    umask = os.umask(0o077)
    try:
        os.makedirs(store, exist_ok=True)
    finally:
        os.umask(umask)
    store = os.path.realpath(store)
    reason = intruder(store)
    if reason:
        raise Unusable(reason)
    if os.statvfs(store).f_flag & os.ST_NOEXEC:
        raise Unusable("%s is on a file system mounted noexec" % store)
    return store


def intruder(folder):
    """Who but us and root could replace what lies in `folder`, as a sentence, or None.

    Every parent counts too: whoever can write there can put another folder in our place, unless it is sticky.
    """
    while folder != "/":
        info = os.stat(folder)
        if info.st_uid not in (0, os.geteuid()) and not unmapped(info.st_uid):
            return "%s belongs to user %d" % (folder, info.st_uid)
        # A user's private group has the user's number: distributions with umask 002 rely on it.
        others = info.st_mode & (0o002 if info.st_gid == info.st_uid else 0o022)
        if others and not info.st_mode & 0o1000:
            return "other users can write to %s" % folder
        folder = os.path.dirname(folder)
    return None


def unmapped(uid):
    """Whether `uid` stands for users from outside of our user namespace (a rootless container's host root)."""
    if uid != OVERFLOW_UID:
        return False
    with open("/proc/self/uid_map") as lines:
        ranges = [[int(number) for number in line.split()] for line in lines]
    return not any(first <= uid < first + count for first, _outside, count in ranges)


# --- Use a complete build, or unpack one.


def hold(folder):
    """Lock the complete build in `folder` against removal until this process ends; whether there was one."""
    try:
        listing = os.open(os.path.join(folder, ".files"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    if not (lock(listing, exclusive=False, wait=False) and complete(folder, listing)):
        os.close(listing)
        return False
    try:
        os.utime(os.path.join(folder, ".files"))  # pruning keeps the builds used last
    except OSError:
        pass  # a read-only cache, filled by someone else, is as good
    return True


def complete(folder, listing):
    """Whether every file is there in full: people, and cleaners of /tmp, remove single files."""
    try:
        # The folder can have been renamed away between our open and our lock.
        if not os.path.samestat(os.fstat(listing), os.stat(os.path.join(folder, ".files"))):
            return False
        for line in os.read(listing, os.fstat(listing).st_size).decode("utf-8").splitlines():
            size, path = line.split(" ", 1)
            if os.stat(os.path.join(folder, path)).st_size != int(size):
                return False
    except OSError:
        return False
    return True


def lock(descriptor, exclusive, wait):
    """flock an open file; whether the caller may go on as if it held the lock.

    Where the file system cannot lock, sharing is safe, as nobody there ever gets the exclusive lock that removal needs.
    """
    import fcntl

    flags = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(descriptor, flags)
    except OSError as error:
        return not exclusive and error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def unpack(store, name, read):
    """Make `store`/`name` a complete build and hold it; `read` gives an archive entry's bytes. Raises OSError."""
    turn = os.open(os.path.join(store, "unpack.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        alone = lock(turn, exclusive=True, wait=True)
        folder = os.path.join(store, name)
        if hold(folder):  # another process unpacked it while we waited
            return
        if alone:
            remove_leftovers(store)
        if sys.stderr is not None and sys.stderr.isatty():
            say("unpacking to %s (first run of this build only)" % folder)
        install(store, folder, read)
        if alone:
            prune(store)
    finally:
        os.close(turn)


def install(store, folder, read):
    """Fill a new folder and rename it to `folder`, in one step for all who look."""
    new = scratch(store)
    umask = os.umask(0o077)
    try:
        os.mkdir(new)
        fill(new, read)
        if os.path.isdir(folder) and not hold(folder):  # incomplete: out of the way in one step, too
            broken = scratch(store)
            os.rename(folder, broken)
            remove(broken)
        try:
            os.rename(new, folder)
        except OSError:
            if not hold(folder):  # where locks do not work, another process may have been first
                raise
            return
        if not hold(folder):
            raise OSError(errno.ENOENT, "what was unpacked is gone again")
    finally:
        os.umask(umask)
        remove(new)


def scratch(store):
    """A name for a folder that nobody loads from, and that the next to unpack removes."""
    import time

    return os.path.join(store, "new-%d-%d" % (os.getpid(), time.time() * 1e6))


def fill(folder, read):
    """Write every file of this Python's parts below `folder`, several parts at a time."""
    import concurrent.futures
    import json

    index = read("payload/index.json")
    check(index, BUILD["payload"], "payload/index.json")
    parts = [part for part in json.loads(index.decode("utf-8")) if tag() in part["tags"]]
    sizes = {}
    for part in parts:
        for path, offset, length in part["pieces"]:
            sizes[path] = max(sizes.get(path, 0), offset + length)
    for path in sizes:
        os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
        open(os.path.join(folder, path), "wb").close()
    pool = concurrent.futures.ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)), len(parts)))
    try:
        for _done in pool.map(lambda part: write_part(folder, part, read), parts):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    with open(os.path.join(folder, ".files"), "wb") as listing:
        listing.write("".join("%d %s\n" % (sizes[path], path) for path in sorted(sizes)).encode("utf-8"))


def write_part(folder, part, read):
    """Expand one part and write its pieces, (path, offset in the file, length), in order."""
    import lzma

    packed = read(part["name"])
    check(packed, part["sha256"], part["name"])
    raw = memoryview(lzma.decompress(packed))
    start = 0
    for path, offset, length in part["pieces"]:
        with open(os.path.join(folder, path), "r+b") as file:
            file.seek(offset)
            file.write(raw[start : start + length])
        start += length


def check(content, sha256, entry):
    """Stop, naming the entry, unless `content` is what was built."""
    import hashlib

    if hashlib.sha256(content).hexdigest() != sha256:
        fail("%s is damaged: %s is not what was built" % (sys.argv[0], entry), "copy or download the file again")


def prune(store):
    """Remove all but the builds used last; never one that a process still runs. Needs unpack.lock."""
    used = []
    for name in os.listdir(store):
        listing = os.path.join(store, name, ".files")
        if os.path.exists(listing) and not name.startswith("new-"):
            used.append((os.stat(listing).st_mtime, name))
    for _time, name in sorted(used, reverse=True)[KEPT_BUILDS:]:
        listing = os.open(os.path.join(store, name, ".files"), os.O_RDWR | os.O_CLOEXEC)
        if lock(listing, exclusive=True, wait=False):
            os.rename(os.path.join(store, name), scratch(store))
        os.close(listing)
    remove_leftovers(store)


def remove_leftovers(store):
    """Remove what killed runs left. Needs unpack.lock: its holder is the only one with a new- folder."""
    for name in os.listdir(store):
        if name.startswith("new-"):
            remove(os.path.join(store, name))


def remove(folder):
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


# --- The way through.


def tag():
    return "cp%d%d" % sys.version_info[:2]


def unpacked(read):
    """The folder of this build, complete and held, in the first usable place; one warning if that is not the first."""
    name = "%s-%s" % (BUILD["payload"][:16], tag())
    refusals = []
    for candidate in candidates():
        try:
            store = open_store(candidate)
            if not hold(os.path.join(store, name)):
                unpack(store, name, read)
        except OSError as error:
            refusals.append("%s: %s" % (candidate, (error.strerror or str(error)).lower()))
        except Unusable as error:
            refusals.append(str(error))
        else:
            if refusals:
                warning = "warning: unpacked to %s instead (%s). hint: set RVLLM_CACHE to a folder of your own"
                say(warning % (store, "; ".join(refusals)))
            return os.path.join(store, name)
    return fail(
        "nowhere to unpack the program (%s)" % "; ".join(refusals),
        "set RVLLM_CACHE to a folder that only you can write to, on a file system not mounted noexec, with 100 MB free",
    )


def fail(message, hint):
    say("error: %s. hint: %s" % (message, hint))
    sys.exit(1)


def answer(text):
    """Write `text` to stdout; the exit code, as rvllm.__main__ has it for streams that are closed or full."""
    if sys.stdout is None:
        return 0
    try:
        sys.stdout.reconfigure(errors="replace")
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            say("error: standard output cannot be written: %s" % error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter's own last flush
        return 1
    return 0


def say(line):
    if sys.stderr is not None:  # closed by the caller
        sys.stderr.write(line + "\n")


def prefer(folder):
    """Make every later import of what lies in `folder` come from there."""
    sys.path[0] = folder  # in place of the archive, which has nothing more to import
    # .pth files of installed packages run before us: cuda-bindings' own imports the `cuda` namespace, and what is in
    # sys.modules would bring in the rest of that other version.
    ours = set(entry.partition(".")[0] for entry in os.listdir(folder))
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
            del sys.modules[name]


def main():
    """Answer, or unpack and hand over to rvllm.__main__."""
    if wrong_python():
        refuse(wrong_python(), "run it as python%s %s" % (minors()[-1], sys.argv[0]))
    if wrong_machine():
        refuse(wrong_machine(), "on other systems install the package with pip")
    if sys.argv[1:] in (["--version"], ["--help"]):
        return answer(BUILD[sys.argv[1][2:]])
    sys.argv[0] = os.path.abspath(sys.argv[0])
    try:
        prefer(unpacked(__spec__.loader.get_data))
        from rvllm.__main__ import main as command_line
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
