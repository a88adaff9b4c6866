/* Preloaded into a server by power_cuts.py: keeps in $DURABLE_DIR what every fsync and fdatasync has
 * made durable below $DURABLE_ROOT. f-KEY is the content of a file, d-KEY the names in a directory;
 * a KEY is the number of an inode and its time of birth. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int key_of(int at, const char *name, int flags, char *key, size_t size, int *mode) {
    struct statx info;
    if (statx(at, name, flags | AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_TYPE | STATX_BTIME, &info))
        return -1;
    *mode = info.stx_mode & S_IFMT;
    snprintf(key, size, "%llu-%lld.%u", (unsigned long long)info.stx_ino,
             (long long)info.stx_btime.tv_sec, info.stx_btime.tv_nsec);
    return 0;
}

static void copy_file(const char *from, int to) {
    char data[65536];
    ssize_t count;
    int file = open(from, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    while ((count = read(file, data, sizeof data)) > 0)
        if (write(to, data, count) != count) break;
    close(file);
}

static void copy_names(const char *from, int to) {
    DIR *directory = opendir(from);
    struct dirent *entry;
    char key[64], line[512];
    int mode;
    if (!directory) return;
    while ((entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (key_of(dirfd(directory), entry->d_name, 0, key, sizeof key, &mode)) continue;
        char kind = mode == S_IFDIR ? 'd' : mode == S_IFREG ? 'f' : 0;
        int size = snprintf(line, sizeof line, "%c %s %s\n", kind, key, entry->d_name);
        if (kind && write(to, line, size) != size) break;
    }
    closedir(directory);
}

static void keep(int fd) {
    const char *root = getenv("DURABLE_ROOT"), *kept = getenv("DURABLE_DIR");
    char link[64], path[4096], key[64], target[4200], fresh[4200];
    int mode, error = errno;
    if (!root || !kept) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    size_t root_length = strlen(root);
    if (strncmp(path, root, root_length) || (path[root_length] && path[root_length] != '/')) return;
    if (key_of(fd, "", AT_EMPTY_PATH, key, sizeof key, &mode)) return;
    if (mode != S_IFREG && mode != S_IFDIR) return;
    snprintf(target, sizeof target, "%s/%c-%s", kept, mode == S_IFDIR ? 'd' : 'f', key);
    snprintf(fresh, sizeof fresh, "%s/new-%ld", kept, syscall(SYS_gettid));
    snprintf(path, sizeof path, "%s/lock", kept);
    /* One copy at a time, so that an older one does not take the place of a newer one. */
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock < 0) return;
    flock(lock, LOCK_EX);
    int to = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (to >= 0) {
        (mode == S_IFDIR ? copy_names : copy_file)(link, to);
        close(to);
        rename(fresh, target);
    }
    close(lock);
    errno = error;
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    int result = real(fd);
    if (!result) keep(fd);
    return result;
}

int fdatasync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    int result = real(fd);
    if (!result) keep(fd);
    return result;
}
