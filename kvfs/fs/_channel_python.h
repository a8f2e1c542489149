/* The Python type kvfs.fs._channel.Channel: what its two files share. Its methods run with the interpreter's lock. */
#ifndef KVFS_CHANNEL_PYTHON_H
#define KVFS_CHANNEL_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include "_channel.h"

typedef struct {
    PyObject_HEAD
    struct channel *channel;
} ChannelObject;

PyObject *channel_publish(ChannelObject *self, PyObject *args);
PyObject *channel_describe(ChannelObject *self, PyObject *args);
PyObject *channel_withdraw(ChannelObject *self, PyObject *node);
PyObject *channel_opens(ChannelObject *self, PyObject *node);
PyObject *channel_take_marks(ChannelObject *self, PyObject *node);
PyObject *channel_take_lookups(ChannelObject *self, PyObject *node);
PyObject *channel_forget(ChannelObject *self, PyObject *node);
PyObject *channel_name_add(ChannelObject *self, PyObject *args);
PyObject *channel_name_remove(ChannelObject *self, PyObject *args);
PyObject *channel_name_gone(ChannelObject *self, PyObject *args);
PyObject *channel_name_searched(ChannelObject *self, PyObject *args);
PyObject *channel_take_misses(ChannelObject *self, PyObject *ignored);
PyObject *channel_take_ended(ChannelObject *self, PyObject *ignored);
PyObject *channel_take_touched(ChannelObject *self, PyObject *ignored);

/* Gives back the reference to the bytes object in which a name's text lies. */
void release_name(const char *text);

#endif
