"""Libraries for LD_PRELOAD, built from C, that let system calls of an agent fail."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def built(tmp_path_factory: pytest.TempPathFactory, source: str) -> Path:
    """Compile *source*, and return the library. Skip the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("A library for LD_PRELOAD needs a C compiler.")
    directory = tmp_path_factory.mktemp("shim")
    text, library = directory / "shim.c", directory / "shim.so"
    text.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(text), "-ldl"], check=True, timeout=60)
    return library


#: Lets calls on files under FAULT_ROOT fail while a file with the name of the fault is in the directory FAULTS:
#: ``write``, ``fsync``, ``open``, and ``stat`` with EIO, and ``readonly`` with EROFS. ``slow`` delays each fsync by
#: 3 s. CLOCK_OFFSET sets the wall clock ahead by so many seconds.
FAULTS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_on(const char *fault) {
    char path[4096];
    const char *directory = getenv("FAULTS");
    if (directory == NULL) return 0;
    snprintf(path, sizeof path, "%s/%s", directory, fault);
    return access(path, F_OK) == 0;
}

static int is_ours(const char *path) {
    const char *root = getenv("FAULT_ROOT");
    return root != NULL && strncmp(path, root, strlen(root)) == 0;
}

static int is_our_file(int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_ours(path);
}

static int may_write(int descriptor) {
    if (!is_our_file(descriptor)) return 1;
    if (is_on("write")) { errno = EIO; return 0; }
    if (is_on("readonly")) { errno = EROFS; return 0; }
    return 1;
}

static int may_open(const char *path, int flags) {
    if (!is_ours(path)) return 1;
    if (is_on("open")) { errno = EIO; return 0; }
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_on("readonly")) { errno = EROFS; return 0; }
    return 1;
}

static int may_look(const char *path) {
    if (is_ours(path) && is_on("stat")) { errno = EIO; return 0; }
    return 1;
}

static int may_change(const char *path) {
    if (is_ours(path) && is_on("readonly")) { errno = EROFS; return 0; }
    return 1;
}

static int sync_by(int (*call)(int), int descriptor) {
    if (is_our_file(descriptor)) {
        if (is_on("slow")) sleep(3);
        if (is_on("fsync")) { errno = EIO; return -1; }
    }
    return call(descriptor);
}

int fsync(int descriptor) { return sync_by(NEXT(fsync), descriptor); }
int fdatasync(int descriptor) { return sync_by(NEXT(fdatasync), descriptor); }

ssize_t write(int descriptor, const void *bytes, size_t size) {
    return may_write(descriptor) ? NEXT(write)(descriptor, bytes, size) : -1;
}
ssize_t pwrite(int descriptor, const void *bytes, size_t size, off_t at) {
    return may_write(descriptor) ? NEXT(pwrite)(descriptor, bytes, size, at) : -1;
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t size, off64_t at) {
    return may_write(descriptor) ? NEXT(pwrite64)(descriptor, bytes, size, at) : -1;
}
int ftruncate(int descriptor, off_t size) { return may_write(descriptor) ? NEXT(ftruncate)(descriptor, size) : -1; }
int ftruncate64(int descriptor, off64_t size) {
    return may_write(descriptor) ? NEXT(ftruncate64)(descriptor, size) : -1;
}
int stat(const char *path, struct stat *found) { return may_look(path) ? NEXT(stat)(path, found) : -1; }
int stat64(const char *path, struct stat64 *found) { return may_look(path) ? NEXT(stat64)(path, found) : -1; }
int unlink(const char *path) { return may_change(path) ? NEXT(unlink)(path) : -1; }
int mkdir(const char *path, mode_t mode) { return may_change(path) ? NEXT(mkdir)(path, mode) : -1; }

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = mode_of(flags, more);
    va_end(more);
    return may_open(path, flags) ? NEXT(open)(path, flags, mode) : -1;
}
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = mode_of(flags, more);
    va_end(more);
    return may_open(path, flags) ? NEXT(open64)(path, flags, mode) : -1;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    int result = syscall(SYS_clock_gettime, clock, found);
    const char *offset = getenv("CLOCK_OFFSET");
    if (result == 0 && clock == CLOCK_REALTIME && offset != NULL) found->tv_sec += atol(offset);
    return result;
}
"""


#: Appends a byte to the file SYNCS for each fsync.
COUNT_SYNCS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static int counted(const char *name, int descriptor) {
    int log = open(getenv("SYNCS"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (log >= 0) {
        if (write(log, ".", 1) < 0) _exit(1);
        close(log);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}
int fsync(int descriptor) { return counted("fsync", descriptor); }
int fdatasync(int descriptor) { return counted("fdatasync", descriptor); }
"""
