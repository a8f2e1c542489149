/* The channel between /dev/fuse and libfuse: what its C files share.
 *
 * _channel.c          the Python type: backing ids, limits, notifications, the beginning and the end
 * _channel_table.c    its methods that fill the table and take from it what was counted
 * _channel_answers.c  kernel -> libfuse: what is answered here, from the table, without Python
 * _channel_bytes.c    the bytes of open files, where the kernel does not move them
 * _channel_ended.c    what was closed and forgotten, of which Python is told later
 * _channel_flush.c    who closed a draft: a program that ends by a signal is found out here
 * _channel_misses.c   which names were looked for and are not there
 * _channel_names.c    which names exist and what they mean
 * _channel_replies.c  libfuse -> kernel: what is added to replies on their way
 */
#ifndef KVFS_CHANNEL_H
#define KVFS_CHANNEL_H

#include <linux/fuse.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

/* Parts of the protocol that are newer than the headers of the oldest distribution we build on. */
#define CHANNEL_FUSE_PASSTHROUGH_FLAGS2 (1u << 5) /* FUSE_PASSTHROUGH is bit 37 of flags and flags2 together */
#define CHANNEL_FUSE_INIT_EXT (1u << 30)
#define CHANNEL_FUSE_AUTO_INVAL_DATA (1u << 12)
#define CHANNEL_FUSE_MAX_PAGES (1u << 22)
#define CHANNEL_FUSE_HANDLE_KILLPRIV_V2 (1u << 28)
#define CHANNEL_FUSE_WRITEBACK_CACHE (1u << 16)
#define CHANNEL_FOPEN_KEEP_CACHE (1u << 1)
#define CHANNEL_FOPEN_NOFLUSH (1u << 5)
#define CHANNEL_FOPEN_PASSTHROUGH (1u << 7)

struct channel_open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct channel_init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint16_t request_timeout, unused[11];
};

/* Numbers below the first entry's, but for the root's, are control files, whose names are not in the set. */
#define CHANNEL_ROOT 1u
#define CHANNEL_FIRST_ENTRY 16u
#define CHANNEL_CONTROL_NAME ".kvfs"
#define CHANNEL_NAME_MAX 255u

/* A file handle given by the channel itself carries this bit and the node number. */
#define CHANNEL_NATIVE_HANDLE (UINT64_C(1) << 63)
/* Added to the handle of a RELEASE whose last FLUSH came from a task that was being ended by a signal. */
#define CHANNEL_KILLED_HANDLE (UINT64_C(1) << 62)
/* Added to the handle of a RELEASE without any FLUSH: the program never got the descriptor, or never closed it. */
#define CHANNEL_UNFLUSHED_HANDLE (UINT64_C(1) << 61)

#define CHANNEL_MAX_WRITE (1u << 20)
#define CHANNEL_BUFFER_BYTES (CHANNEL_MAX_WRITE + 65536)
/* A directory listing is asked for in pieces that fit an unprivileged socket buffer. */
#define CHANNEL_MAX_LISTING 65536u
#define CHANNEL_PENDING 65536u
#define CHANNEL_FLUSHES 1024u
#define CHANNEL_TOUCHED_SLOTS 65536u
#define CHANNEL_ENDED 16384u
#define CHANNEL_TASKS 256u
#define CHANNEL_SEARCHES 8u
#define CHANNEL_GONE_NAMES (1u << 18)
#define CHANNEL_CACHE_SECONDS 3600u
#define CHANNEL_DIRECTORY_SECONDS 1u
#define CHANNEL_INLINE_ALLOCATION (32u << 20)
#define CHANNEL_ALLOCATIONS 8u

enum record_flags {
    RECORD_KNOWN = 1u << 0,   /* owner and mode are valid: LOOKUP and GETATTR are answered here */
    RECORD_SEALED = 1u << 1,  /* an open for reading is answered here */
    RECORD_FULL = 1u << 2,    /* a write through the daemon was refused for want of room */
    RECORD_TOUCHED = 1u << 3, /* it is in the list of touched nodes */
    RECORD_SIZED = 1u << 4,   /* fallocate gave it its size or punched holes */
    RECORD_DESCRIBED = 1u << 5 /* the description is of the file as it is now */
};

/* What stat tells of a page of which we hold no descriptor. */
struct description {
    int64_t atime_ns, mtime_ns;
    uint64_t size, blocks;
    uint32_t links, block_size;
};

/* One node. Guarded by channel.lock; written by Python except for what is counted and for FULL, TOUCHED and SIZED. */
struct record {
    int32_t backing_id; /* 0: none, the kernel sends READ and WRITE */
    int32_t read_fd;    /* -1: none, the description tells of the file */
    int32_t write_fd;   /* -1: nobody has it open for writing */
    uint32_t flags;
    uint32_t mode, uid, gid;
    int64_t changed_ns; /* when it was changed itself, and not its bytes or names */
    uint32_t opens;   /* handles given here and not yet released */
    uint32_t hits;    /* opens since Python last collected them */
    uint32_t lookups; /* how often the kernel was told of the node here since Python last asked */
    struct description description;
};

struct pending_reply {
    _Atomic uint64_t unique;
    uint64_t nodeid;
    uint32_t opcode;
    bool read_only;
};

/* A map from (number, text) to a number; see _channel_names.c. Locking is the caller's. */
struct names {
    struct name_slot *slots;
    uint64_t slot_count, used;
};

/* Replaces what is there, whose text is given back in ``old`` (else NULL). False when there is no memory. */
bool names_put(struct names *names, uint64_t number, const char *text, size_t length, uint32_t value, const char **old);
bool names_get(const struct names *names, uint64_t number, const char *text, size_t length, uint32_t *value);
/* The text that was added, or NULL. */
const char *names_remove(struct names *names, uint64_t number, const char *text, size_t length);
void names_clear(struct names *names, void (*release)(const char *text));

/* The same for the same name, in the map and in what is counted of names that are not in it. */
uint64_t name_hash(uint64_t number, const char *text, size_t length);

/* A name that a task looked for in vain. */
struct search {
    uint64_t name; /* its hash */
    int64_t since_ms;
    uint32_t task;
    bool waits; /* it is not counted yet */
};

/* See _channel_misses.c. Guarded by channel.lock, as the functions expect. */
struct misses {
    struct search searches[CHANNEL_TASKS][CHANNEL_SEARCHES]; /* by the task's number; the latest first */
    uint32_t gone[CHANNEL_GONE_NAMES]; /* by the name's hash: a part of it, and whether it was evicted */
    uint64_t absent, evicted;          /* since Python last asked */
};

/* Somebody looked for a name that is not there. ``name`` ends with a zero. */
void misses_searched(struct misses *misses, uint32_t task, uint64_t parent, const char *name, size_t length);
/* A task is about to give a name to something. */
void misses_made(struct misses *misses, uint32_t task, uint64_t parent, const char *name, size_t length);
/* A page is about to lose its name: it is evicted, or the miss of whoever looks for it next was counted already. */
void misses_gone(struct misses *misses, uint64_t parent, const char *name, size_t length, bool evicted);
/* The name means something again. */
void misses_came_back(struct misses *misses, uint64_t parent, const char *name, size_t length);
/* Counts the searches that have waited long enough. */
void misses_settle(struct misses *misses);

/* A FLUSH of a draft that waits for its answer. */
struct flush {
    uint64_t unique, handle;
    int64_t since_ms;
    uint32_t task;
    bool answered;
};

/* A handle that was closed, or a node of which the kernel forgot so many look-ups. */
struct end {
    uint64_t number;
    uint32_t lookups; /* 0: it is a handle */
};

/* See _channel_ended.c. Guarded by channel.lock. */
struct ended {
    struct end list[CHANNEL_ENDED];
    uint32_t count;
    int timer; /* readable some time after the first came into the list */
};

/* See _channel_flush.c. The ring holds what lies between head and tail, the first perhaps being looked into now. */
struct flushes {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct flush ring[CHANNEL_FLUSHES];
    uint64_t head, tail;
    bool stopping;
    struct names last; /* handles of drafts, and whether who sent their last FLUSH was ended by a signal */
};

struct channel {
    int device, inner, outer, tier, ended_event;
    bool passthrough_wanted, statfs_wanted, started;
    _Atomic bool names_complete; /* whether a name that is not in the map does not exist */
    pthread_t answers_thread, replies_thread, flushes_thread;
    pthread_mutex_t lock;
    struct record *table;
    uint64_t table_size;
    pthread_cond_t allocated;
    uint32_t allocations; /* fallocates that run in threads of their own; guarded by channel.lock, like what follows */
    struct names names; /* directory's number and name give the node */
    uint32_t touched[CHANNEL_TOUCHED_SLOTS];
    uint32_t touched_count;
    struct misses misses;
    struct ended ended;
    uint64_t forgotten_hits; /* of records that were forgotten before their hits were collected */
    struct pending_reply pending[CHANNEL_PENDING];
    struct flushes flushes;
    _Atomic uint64_t init_unique;
    uint32_t init_flags, init_flags2;
    _Atomic int passthrough_active;
    _Atomic uint64_t file_bytes_limit; /* EFBIG above it */
    _Atomic int64_t write_budget;      /* bytes by which files may still grow through WRITE; INT64_MAX: no limit of ours */
    _Atomic int64_t grown;             /* bytes by which they did since Python last asked */
    _Atomic uint64_t answered, forwarded, reply_errors;
};

/* Bounds-checked; NULL for a node beyond the table. Caller holds channel->lock. */
struct record *channel_record(struct channel *channel, uint64_t nodeid);
/* What the mount tells of the node's file, which is known by its descriptor or its description; false if by neither.
 * Caller holds the lock. */
bool channel_status(const struct record *record, struct stat *status);
/* To libfuse; false once it no longer reads. */
bool channel_forward(struct channel *channel, const void *message, size_t length);
/* Remembers what the reply to a request has to know. */
void channel_expect(struct channel *channel, uint64_t unique, uint64_t nodeid, uint32_t opcode, bool read_only);
ssize_t channel_reply(struct channel *channel, uint64_t unique, int error, const void *payload, size_t length);

struct request {
    struct fuse_in_header *header;
    void *body;
    size_t body_length;
};

/* Each sends a reply and says so, or leaves the request to Python. */
bool answer_read(struct channel *channel, struct request *request, char *buffer);
bool answer_write(struct channel *channel, struct request *request);
bool answer_lseek(struct channel *channel, struct request *request);
bool answer_fallocate(struct channel *channel, struct request *request);
/* The answer to a fallocate that Python was asked for: cuts the reply to one of a fallocate, and gives its length. */
size_t fallocate_answered(struct channel *channel, uint64_t nodeid, struct fuse_out_header *reply);
/* Until no fallocate runs. */
void allocations_wait(struct channel *channel);

/* Puts it into the list of which Python is told later; false when that is full. */
bool ended_note(struct channel *channel, uint64_t number, uint32_t lookups);
/* These get no reply. */
bool answer_forget(struct channel *channel, struct request *request);
bool answer_batch_forget(struct channel *channel, struct request *request);

/* FLUSH of a draft: answered soon, and remembered for the RELEASE that follows. */
void flush_submit(struct channel *channel, uint64_t unique, uint64_t handle, uint32_t task);
/* Answers those that have waited too long. Called before the answers thread waits for a request. */
void flush_expire(struct channel *channel);
/* The handle of a RELEASE, with what its last FLUSH told. */
uint64_t flush_taken(struct channel *channel, uint64_t handle);
void *channel_flushes_main(void *channel);

void *channel_answers_main(void *channel);
void *channel_replies_main(void *channel);

#endif
