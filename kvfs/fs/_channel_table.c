/* The table and the names: how Python fills them, and how it takes what was counted meanwhile. */
#include "_channel_python.h"

#include <string.h>

#define NANOSECONDS 1000000000

struct record *channel_record(struct channel *channel, uint64_t nodeid) {
    return nodeid < channel->table_size ? &channel->table[nodeid] : NULL;
}

static struct timespec time_of(int64_t ns) {
    int64_t fraction = ns % NANOSECONDS;
    if (fraction < 0)
        fraction += NANOSECONDS;
    return (struct timespec){(ns - fraction) / NANOSECONDS, fraction};
}

static struct timespec later(struct timespec one, struct timespec other) {
    bool after = one.tv_sec != other.tv_sec ? one.tv_sec > other.tv_sec : one.tv_nsec > other.tv_nsec;
    return after ? one : other;
}

static bool read_status(const struct record *record, struct stat *status) {
    const struct description *description = &record->description;
    if (!(record->flags & RECORD_KNOWN))
        return false;
    if (record->read_fd >= 0)
        return fstat(record->read_fd, status) == 0;
    if (!(record->flags & RECORD_DESCRIBED))
        return false;
    memset(status, 0, sizeof *status);
    status->st_size = (off_t)description->size;
    status->st_blocks = (blkcnt_t)description->blocks;
    status->st_nlink = description->links;
    status->st_blksize = description->block_size;
    status->st_atim = time_of(description->atime_ns);
    status->st_mtim = time_of(description->mtime_ns);
    return true;
}

/* Python tells the same: entry_attributes in attributes.py. */
bool channel_status(const struct record *record, struct stat *status) {
    if (!read_status(record, status))
        return false;
    status->st_ctim = later(status->st_mtim, time_of(record->changed_ns));
    if (S_ISDIR(record->mode))
        status->st_size = 0;
    return true;
}

static PyObject *beyond_table(void) {
    PyErr_SetString(PyExc_IndexError, "the node is beyond the channel's table");
    return NULL;
}

PyObject *channel_publish(ChannelObject *self, PyObject *args) {
    unsigned long long node;
    int read_fd, write_fd, backing_id, sealed;
    unsigned int mode, uid, gid;
    long long changed_ns;
    if (!PyArg_ParseTuple(args, "KiiipIIIL", &node, &read_fd, &write_fd, &backing_id, &sealed, &mode, &uid, &gid,
                          &changed_ns))
        return NULL;
    pthread_mutex_lock(&self->channel->lock);
    struct record *record = channel_record(self->channel, node);
    if (record) {
        uint32_t kept = RECORD_FULL | RECORD_SIZED | RECORD_TOUCHED | (read_fd < 0 ? RECORD_DESCRIBED : 0);
        record->backing_id = backing_id;
        record->read_fd = read_fd;
        record->write_fd = write_fd;
        record->mode = mode;
        record->uid = uid;
        record->gid = gid;
        record->changed_ns = changed_ns;
        record->flags = (record->flags & kept) | RECORD_KNOWN | (sealed ? RECORD_SEALED : 0);
    }
    pthread_mutex_unlock(&self->channel->lock);
    if (!record)
        return beyond_table();
    Py_RETURN_NONE;
}

PyObject *channel_describe(ChannelObject *self, PyObject *args) {
    unsigned long long node, size, blocks;
    unsigned int links, block_size;
    long long atime_ns, mtime_ns;
    if (!PyArg_ParseTuple(args, "KKKIILL", &node, &size, &blocks, &links, &block_size, &atime_ns, &mtime_ns))
        return NULL;
    pthread_mutex_lock(&self->channel->lock);
    struct record *record = channel_record(self->channel, node);
    if (record) {
        record->description = (struct description){atime_ns, mtime_ns, size, blocks, links, block_size};
        record->flags |= RECORD_DESCRIBED;
    }
    pthread_mutex_unlock(&self->channel->lock);
    if (!record)
        return beyond_table();
    Py_RETURN_NONE;
}

/* Common to the calls that name one node and take or clear something of its record. */
static PyObject *with_record(ChannelObject *self, PyObject *argument,
                             PyObject *(*take)(struct channel *, struct record *)) {
    unsigned long long node = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    struct record none = {.read_fd = -1, .write_fd = -1};
    pthread_mutex_lock(&self->channel->lock);
    struct record *record = channel_record(self->channel, node);
    PyObject *result = take(self->channel, record ? record : &none);
    pthread_mutex_unlock(&self->channel->lock);
    return result;
}

static PyObject *take_withdrawn(struct channel *Py_UNUSED(channel), struct record *record) {
    record->flags &= ~RECORD_SEALED;
    return PyLong_FromUnsignedLong(record->opens);
}

static PyObject *take_opens(struct channel *Py_UNUSED(channel), struct record *record) {
    return PyLong_FromUnsignedLong(record->opens);
}

static PyObject *take_marks(struct channel *Py_UNUSED(channel), struct record *record) {
    uint32_t flags = record->flags;
    record->flags &= ~(RECORD_FULL | RECORD_SIZED);
    return Py_BuildValue("(NN)", PyBool_FromLong(flags & RECORD_FULL), PyBool_FromLong(flags & RECORD_SIZED));
}

static PyObject *take_lookups(struct channel *Py_UNUSED(channel), struct record *record) {
    uint32_t lookups = record->lookups;
    record->lookups = 0;
    return PyLong_FromUnsignedLong(lookups);
}

static PyObject *take_forgotten(struct channel *channel, struct record *record) {
    uint32_t touched = record->flags & RECORD_TOUCHED; /* its place in the list is cleared with the list */
    uint32_t lookups = record->lookups;
    channel->forgotten_hits += record->hits;
    memset(record, 0, sizeof *record);
    record->flags = touched;
    record->read_fd = record->write_fd = -1;
    return PyLong_FromUnsignedLong(lookups);
}

PyObject *channel_withdraw(ChannelObject *self, PyObject *node) { return with_record(self, node, take_withdrawn); }
PyObject *channel_opens(ChannelObject *self, PyObject *node) { return with_record(self, node, take_opens); }
PyObject *channel_take_marks(ChannelObject *self, PyObject *node) { return with_record(self, node, take_marks); }
PyObject *channel_take_lookups(ChannelObject *self, PyObject *node) { return with_record(self, node, take_lookups); }
PyObject *channel_forget(ChannelObject *self, PyObject *node) { return with_record(self, node, take_forgotten); }

/* The map points into the bytes object and holds a reference to it, so that a name is in memory once. */
void release_name(const char *text) {
    if (text)
        Py_DECREF((PyObject *)(text - offsetof(PyBytesObject, ob_sval)));
}

PyObject *channel_name_add(ChannelObject *self, PyObject *args) {
    unsigned long long parent, node;
    PyObject *name;
    const char *replaced;
    if (!PyArg_ParseTuple(args, "KSK", &parent, &name, &node))
        return NULL;
    if (node >= self->channel->table_size)
        return beyond_table();
    size_t length = (size_t)PyBytes_GET_SIZE(name);
    Py_INCREF(name);
    pthread_mutex_lock(&self->channel->lock);
    bool added = names_put(&self->channel->names, parent, PyBytes_AS_STRING(name), length, (uint32_t)node, &replaced);
    misses_came_back(&self->channel->misses, parent, PyBytes_AS_STRING(name), length);
    pthread_mutex_unlock(&self->channel->lock);
    if (!added) {
        Py_DECREF(name);
        return PyErr_NoMemory();
    }
    release_name(replaced);
    Py_RETURN_NONE;
}

PyObject *channel_name_remove(ChannelObject *self, PyObject *args) {
    unsigned long long parent;
    PyObject *name;
    if (!PyArg_ParseTuple(args, "KS", &parent, &name))
        return NULL;
    pthread_mutex_lock(&self->channel->lock);
    const char *removed =
        names_remove(&self->channel->names, parent, PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name));
    pthread_mutex_unlock(&self->channel->lock);
    release_name(removed);
    Py_RETURN_NONE;
}

PyObject *channel_name_gone(ChannelObject *self, PyObject *args) {
    unsigned long long parent;
    PyObject *name;
    int evicted;
    if (!PyArg_ParseTuple(args, "KSp", &parent, &name, &evicted))
        return NULL;
    pthread_mutex_lock(&self->channel->lock);
    misses_gone(&self->channel->misses, parent, PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name), evicted);
    pthread_mutex_unlock(&self->channel->lock);
    Py_RETURN_NONE;
}

PyObject *channel_name_searched(ChannelObject *self, PyObject *args) {
    unsigned long long parent;
    unsigned int task;
    PyObject *name;
    if (!PyArg_ParseTuple(args, "KSI", &parent, &name, &task))
        return NULL;
    pthread_mutex_lock(&self->channel->lock);
    misses_searched(&self->channel->misses, task, parent, PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name));
    pthread_mutex_unlock(&self->channel->lock);
    Py_RETURN_NONE;
}

PyObject *channel_take_misses(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    struct misses *misses = &self->channel->misses;
    pthread_mutex_lock(&self->channel->lock);
    misses_settle(misses);
    unsigned long long absent = misses->absent, evicted = misses->evicted;
    misses->absent = misses->evicted = 0;
    pthread_mutex_unlock(&self->channel->lock);
    return Py_BuildValue("(KK)", absent, evicted);
}

/* The list is read without its lock: only this thread makes it shorter, and what is in it does not change. */
static bool list_ends(const struct ended *ended, uint32_t count, PyObject *handles, PyObject *nodes) {
    for (uint32_t i = 0; i < count; i++) {
        unsigned long long number = ended->list[i].number;
        unsigned long lookups = ended->list[i].lookups;
        PyObject *item = lookups ? Py_BuildValue("(Kk)", number, lookups) : PyLong_FromUnsignedLongLong(number);
        int failed = item ? PyList_Append(lookups ? nodes : handles, item) : -1;
        Py_XDECREF(item);
        if (failed)
            return false;
    }
    return true;
}

PyObject *channel_take_ended(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    struct ended *ended = &self->channel->ended;
    pthread_mutex_lock(&self->channel->lock);
    uint32_t count = ended->count;
    pthread_mutex_unlock(&self->channel->lock);
    PyObject *handles = PyList_New(0), *nodes = PyList_New(0);
    if (!handles || !nodes || !list_ends(ended, count, handles, nodes)) {
        Py_XDECREF(handles);
        Py_XDECREF(nodes);
        return NULL;
    }
    pthread_mutex_lock(&self->channel->lock);
    ended->count -= count;
    memmove(ended->list, ended->list + count, ended->count * sizeof ended->list[0]);
    pthread_mutex_unlock(&self->channel->lock);
    return Py_BuildValue("(NN)", handles, nodes);
}

struct touch {
    uint32_t node, hits;
};

/* So many at once: what Python makes of them takes milliseconds, and others wait for the loop meanwhile. */
#define MOST_TOUCHES 512

static uint32_t count_touched(struct channel *channel) {
    pthread_mutex_lock(&channel->lock);
    uint32_t count = channel->touched_count;
    pthread_mutex_unlock(&channel->lock);
    return count < MOST_TOUCHES ? count : MOST_TOUCHES;
}

/* The first ``count`` that were touched move out under the lock; Python's objects are made of them afterwards. */
static uint64_t take_touches(struct channel *channel, struct touch *touches, uint32_t count) {
    pthread_mutex_lock(&channel->lock);
    for (uint32_t i = 0; i < count; i++) {
        struct record *record = &channel->table[channel->touched[i]];
        touches[i] = (struct touch){channel->touched[i], record->hits};
        record->hits = 0;
        record->flags &= ~RECORD_TOUCHED;
    }
    channel->touched_count -= count;
    memmove(channel->touched, channel->touched + count, channel->touched_count * sizeof channel->touched[0]);
    uint64_t forgotten_hits = channel->forgotten_hits;
    channel->forgotten_hits = 0;
    pthread_mutex_unlock(&channel->lock);
    return forgotten_hits;
}

static PyObject *list_touches(const struct touch *touches, uint32_t count, uint64_t forgotten_hits) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i <= count; i++) {
        unsigned long long node = i < count ? touches[i].node : 0, hits = i < count ? touches[i].hits : forgotten_hits;
        if (!hits)
            continue;
        PyObject *pair = Py_BuildValue("(KK)", node, hits);
        if (!pair || PyList_Append(list, pair) != 0)
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

PyObject *channel_take_touched(ChannelObject *self, PyObject *Py_UNUSED(ignored)) {
    uint32_t count = count_touched(self->channel); /* only this thread makes it smaller */
    struct touch *touches = PyMem_Malloc(count * sizeof *touches);
    if (!touches)
        return PyErr_NoMemory();
    uint64_t forgotten_hits = take_touches(self->channel, touches, count);
    PyObject *list = list_touches(touches, count, forgotten_hits);
    PyMem_Free(touches);
    return list;
}
