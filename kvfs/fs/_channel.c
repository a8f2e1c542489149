/* The Python type kvfs.fs._channel.Channel; what it is for stands in channel.py. */
#include "_channel_python.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

static PyObject *os_error(int error) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* A large buffer where privilege allows it: fewer waits of the answering thread on a busy Python. */
static void widen(int fd) {
    int size = 8 << 20;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) != 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) != 0)
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static int channel_init(ChannelObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"device", "tier", "passthrough", "statfs", "table_size", NULL};
    int device, tier, passthrough, statfs, ends[2];
    unsigned long long table_size;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iippK", names, &device, &tier, &passthrough, &statfs, &table_size))
        return -1;
    if (self->channel) {
        PyErr_SetString(PyExc_RuntimeError, "the channel is already initialised");
        return -1;
    }
    struct channel *channel = PyMem_RawCalloc(1, sizeof *channel);
    if (!channel) {
        PyErr_NoMemory();
        return -1;
    }
    channel->table = mmap(NULL, table_size * sizeof(struct record), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (channel->table == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (channel->table != MAP_FAILED)
            munmap(channel->table, table_size * sizeof(struct record));
        PyMem_RawFree(channel);
        return -1;
    }
    channel->table_size = table_size;
    channel->device = device;
    channel->tier = tier;
    channel->passthrough_wanted = passthrough;
    channel->statfs_wanted = statfs;
    channel->inner = ends[0];
    channel->outer = ends[1];
    widen(ends[0]);
    widen(ends[1]);
    channel->ended_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    channel->ended.timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    pthread_mutex_init(&channel->lock, NULL);
    pthread_cond_init(&channel->allocated, NULL);
    pthread_mutex_init(&channel->flushes.lock, NULL);
    pthread_cond_init(&channel->flushes.changed, NULL);
    atomic_store(&channel->file_bytes_limit, UINT64_MAX);
    atomic_store(&channel->write_budget, INT64_MAX);
    atomic_store(&channel->names_complete, true);
    self->channel = channel;
    return 0;
}

static PyObject *channel_start(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    struct channel *channel = self->channel;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to Python's main thread */
    int error = pthread_create(&channel->flushes_thread, NULL, channel_flushes_main, channel);
    if (!error)
        error = pthread_create(&channel->answers_thread, NULL, channel_answers_main, channel);
    if (!error) {
        error = pthread_create(&channel->replies_thread, NULL, channel_replies_main, channel);
        channel->started = !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return os_error(error);
    Py_RETURN_NONE;
}

/* Call it once the kernel's side has ended and libfuse no longer reads: it waits for both threads. */
static PyObject *channel_stop(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    struct channel *channel = self->channel;
    if (channel->started) {
        channel->started = false;
        Py_BEGIN_ALLOW_THREADS
        shutdown(channel->outer, SHUT_RDWR);
        pthread_join(channel->answers_thread, NULL);
        pthread_join(channel->replies_thread, NULL);
        pthread_mutex_lock(&channel->flushes.lock);
        channel->flushes.stopping = true;
        pthread_cond_signal(&channel->flushes.changed);
        pthread_mutex_unlock(&channel->flushes.lock);
        pthread_join(channel->flushes_thread, NULL);
        allocations_wait(channel);
        Py_END_ALLOW_THREADS
    }
    close(channel->inner);
    close(channel->outer);
    close(channel->device);
    close(channel->ended_event);
    close(channel->ended.timer);
    channel->ended.timer = -1;
    channel->inner = channel->outer = channel->device = channel->ended_event = -1;
    Py_RETURN_NONE;
}

static PyObject *channel_backing_open(ChannelObject *self, PyObject *argument) {
    struct backing_map map = {.fd = (int32_t)PyLong_AsLong(argument)};
    if (PyErr_Occurred())
        return NULL;
    int id = ioctl(self->channel->device, BACKING_OPEN, &map);
    return id < 0 ? os_error(errno) : PyLong_FromLong(id);
}

static PyObject *channel_backing_close(ChannelObject *self, PyObject *argument) {
    uint32_t id = (uint32_t)PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (ioctl(self->channel->device, BACKING_CLOSE, &id) != 0)
        return os_error(errno);
    Py_RETURN_NONE;
}

static PyObject *channel_set_limits(ChannelObject *self, PyObject *args) {
    unsigned long long file_bytes;
    long long budget;
    if (!PyArg_ParseTuple(args, "KL", &file_bytes, &budget))
        return NULL;
    atomic_store(&self->channel->file_bytes_limit, file_bytes);
    atomic_store(&self->channel->write_budget, budget < 0 ? INT64_MAX : budget);
    Py_RETURN_NONE;
}

static PyObject *channel_set_names_complete(ChannelObject *self, PyObject *argument) {
    int complete = PyObject_IsTrue(argument);
    if (complete < 0)
        return NULL;
    atomic_store(&self->channel->names_complete, complete);
    Py_RETURN_NONE;
}

static PyObject *channel_take_growth(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(atomic_exchange(&self->channel->grown, 0));
}

/* Notifications go to the device itself, never through libfuse: the kernel may make their sender wait for a lock
 * that a request holds, whose reply only the replies thread can deliver. */
static PyObject *notify(ChannelObject *self, int code, const struct iovec *parts, int count) {
    struct fuse_out_header header = {sizeof header, code, 0};
    struct iovec all[4] = {{&header, sizeof header}};
    for (int i = 0; i < count; i++) {
        all[i + 1] = parts[i];
        header.len += (uint32_t)parts[i].iov_len;
    }
    ssize_t written;
    int error;
    Py_BEGIN_ALLOW_THREADS
    written = writev(self->channel->device, all, count + 1);
    error = errno;
    Py_END_ALLOW_THREADS
    if (written < 0)
        return os_error(error);
    Py_RETURN_NONE;
}

static PyObject *channel_invalidate_entry(ChannelObject *self, PyObject *args) {
    unsigned long long parent;
    const char *name;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Ky#", &parent, &name, &length))
        return NULL;
    struct fuse_notify_inval_entry_out out = {.parent = parent, .namelen = (uint32_t)length};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)name, (size_t)length + 1}};
    return notify(self, FUSE_NOTIFY_INVAL_ENTRY, parts, 2);
}

static PyObject *channel_statistics(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    struct channel *channel = self->channel;
    return Py_BuildValue("{s:K,s:K,s:K}", "answered", (unsigned long long)atomic_load(&channel->answered), "forwarded",
                         (unsigned long long)atomic_load(&channel->forwarded), "reply_errors",
                         (unsigned long long)atomic_load(&channel->reply_errors));
}

static PyObject *get_session_fd(ChannelObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(self->channel->inner);
}
static PyObject *get_ended_fd(ChannelObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(self->channel->ended_event);
}
static PyObject *get_news_fd(ChannelObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(self->channel->ended.timer);
}
static PyObject *get_passthrough_active(ChannelObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(atomic_load(&self->channel->passthrough_active));
}

static void channel_dealloc(ChannelObject *self) {
    /* The threads use the structure for as long as they run: without stop() it is left to the end of the process. */
    if (self->channel && !self->channel->started) {
        names_clear(&self->channel->names, release_name);
        names_clear(&self->channel->flushes.last, NULL);
        munmap(self->channel->table, self->channel->table_size * sizeof(struct record));
        PyMem_RawFree(self->channel);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)channel_start, METH_NOARGS, "Start the three threads."},
    {"stop", (PyCFunction)channel_stop, METH_NOARGS, "Wait for the threads and close every descriptor."},
    {"backing_open", (PyCFunction)channel_backing_open, METH_O, "backing_open(fd) -> id"},
    {"backing_close", (PyCFunction)channel_backing_close, METH_O, "backing_close(id)"},
    {"publish", (PyCFunction)channel_publish, METH_VARARGS,
     "publish(node, read_fd, write_fd, backing_id, sealed, mode, uid, gid, changed_ns)"},
    {"describe", (PyCFunction)channel_describe, METH_VARARGS,
     "describe(node, size, blocks, links, block_size, atime_ns, mtime_ns): for as long as it has no read_fd"},
    {"withdraw", (PyCFunction)channel_withdraw, METH_O, "withdraw(node) -> handles given natively and still open"},
    {"opens", (PyCFunction)channel_opens, METH_O, "opens(node) -> handles given natively and still open"},
    {"take_marks", (PyCFunction)channel_take_marks, METH_O,
     "take_marks(node) -> (whether a write found no room, whether fallocate gave a size)"},
    {"take_lookups", (PyCFunction)channel_take_lookups, METH_O,
     "take_lookups(node) -> how often the kernel was told of it since the last call"},
    {"forget", (PyCFunction)channel_forget, METH_O, "forget(node) -> like take_lookups; clears the record"},
    {"name_add", (PyCFunction)channel_name_add, METH_VARARGS, "name_add(parent, name, node): what the name means"},
    {"name_remove", (PyCFunction)channel_name_remove, METH_VARARGS, "name_remove(parent, name): it means nothing"},
    {"name_gone", (PyCFunction)channel_name_gone, METH_VARARGS,
     "name_gone(parent, name, evicted): a page is about to lose it; if not evicted, the miss is counted already"},
    {"name_searched", (PyCFunction)channel_name_searched, METH_VARARGS,
     "name_searched(parent, name, task): libfuse was asked for it, and it is not there"},
    {"take_misses", (PyCFunction)channel_take_misses, METH_NOARGS,
     "take_misses() -> (names looked for in vain that were never there, that were evicted) since the last call"},
    {"take_touched", (PyCFunction)channel_take_touched, METH_NOARGS,
     "take_touched() -> [(node, opens)], at most 513; node 0 stands for those that were forgotten"},
    {"take_ended", (PyCFunction)channel_take_ended, METH_NOARGS,
     "take_ended() -> ([handle], [(node, lookups)]): what was closed and what the kernel forgot since the last call"},
    {"set_limits", (PyCFunction)channel_set_limits, METH_VARARGS,
     "set_limits(file_bytes, write_budget): the budget is unlimited if negative"},
    {"set_names_complete", (PyCFunction)channel_set_names_complete, METH_O,
     "set_names_complete(complete): whether names that were not added do not exist"},
    {"take_growth", (PyCFunction)channel_take_growth, METH_NOARGS,
     "take_growth() -> bytes that bounded writes added since the last call"},
    {"invalidate_entry", (PyCFunction)channel_invalidate_entry, METH_VARARGS,
     "invalidate_entry(parent, name): may block; never on the event loop"},
    {"statistics", (PyCFunction)channel_statistics, METH_NOARGS, "statistics() -> {name: count}"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"session_fd", (getter)get_session_fd, NULL, "libfuse's end of the pair", NULL},
    {"ended_fd", (getter)get_ended_fd, NULL, "an eventfd, readable once the kernel's side has ended", NULL},
    {"news_fd", (getter)get_news_fd, NULL, "a timerfd, readable when it is time for take_ended", NULL},
    {"passthrough_active", (getter)get_passthrough_active, NULL, "whether the kernel agreed to passthrough", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject channel_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvfs.fs._channel.Channel",
    .tp_basicsize = sizeof(ChannelObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)channel_init,
    .tp_dealloc = (destructor)channel_dealloc,
    .tp_methods = methods,
    .tp_getset = properties,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_channel", "The channel between the kernel and libfuse.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__channel(void) {
    if (PyType_Ready(&channel_type) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (self && PyModule_AddObjectRef(self, "Channel", (PyObject *)&channel_type) < 0)
        Py_CLEAR(self);
    return self;
}
