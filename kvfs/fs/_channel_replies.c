/* From libfuse to the kernel: replies pass unchanged, except that INIT asks for passthrough and that the replies
 * to OPEN and CREATE carry the backing file of the node they open, and that the answer to a fallocate that Python
 * gave as a change of size becomes one of a fallocate.
 */
#include "_channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static size_t extend_init(struct channel *channel, char *message, size_t length, size_t capacity) {
    struct fuse_out_header *header = (void *)message;
    struct channel_init_out out = {0};
    size_t given = length - sizeof *header;
    if (header->error || sizeof *header + sizeof out > capacity)
        return length;
    memcpy(&out, header + 1, given < sizeof out ? given : sizeof out);
    out.flags &= ~CHANNEL_FUSE_WRITEBACK_CACHE; /* sizes and times would be the kernel's guess, not the file's */
    out.flags &= ~CHANNEL_FUSE_AUTO_INVAL_DATA; /* bytes change through this kernel only: its copy is right */
    out.flags |= channel->init_flags & (CHANNEL_FUSE_MAX_PAGES | CHANNEL_FUSE_HANDLE_KILLPRIV_V2);
    out.max_pages = CHANNEL_MAX_WRITE / 4096;
    out.max_write = CHANNEL_MAX_WRITE;
    if (channel->passthrough_wanted && (channel->init_flags2 & CHANNEL_FUSE_PASSTHROUGH_FLAGS2)) {
        out.flags |= CHANNEL_FUSE_INIT_EXT;
        out.flags2 |= CHANNEL_FUSE_PASSTHROUGH_FLAGS2;
        out.max_stack_depth = 1; /* tiers lie on no stacked filesystem */
        atomic_store(&channel->passthrough_active, 1);
    }
    memcpy(header + 1, &out, sizeof out);
    header->len = (uint32_t)(sizeof *header + sizeof out);
    return header->len;
}

/* Gives the length of the reply. */
static size_t complete(struct channel *channel, char *message, size_t length) {
    struct fuse_out_header *header = (void *)message;
    struct pending_reply *slot = &channel->pending[(header->unique >> 1) % CHANNEL_PENDING];
    if (atomic_load_explicit(&slot->unique, memory_order_acquire) != header->unique)
        return length;
    uint32_t opcode = slot->opcode;
    uint64_t nodeid = slot->nodeid;
    atomic_store_explicit(&slot->unique, 0, memory_order_release);
    if (opcode == FUSE_FALLOCATE)
        return fallocate_answered(channel, nodeid, header);
    size_t expected = sizeof *header + sizeof(struct channel_open_out);
    if (opcode == FUSE_CREATE)
        expected += sizeof(struct fuse_entry_out);
    if (header->error || length != expected)
        return length;
    if (opcode == FUSE_CREATE)
        nodeid = ((struct fuse_entry_out *)(header + 1))->nodeid;
    struct channel_open_out *out = (void *)(message + length - sizeof *out);
    pthread_mutex_lock(&channel->lock);
    struct record *record = channel_record(channel, nodeid);
    if (record && record->backing_id > 0) {
        out->backing_id = record->backing_id;
        out->open_flags = (out->open_flags & ~CHANNEL_FOPEN_KEEP_CACHE) | CHANNEL_FOPEN_PASSTHROUGH;
    } else {
        out->backing_id = 0;
    }
    pthread_mutex_unlock(&channel->lock);
    if (slot->read_only)
        out->open_flags |= CHANNEL_FOPEN_NOFLUSH;
    return length;
}

void *channel_replies_main(void *argument) {
    struct channel *channel = argument;
    char *message = malloc(CHANNEL_BUFFER_BYTES);
    while (message) {
        ssize_t length = recv(channel->outer, message, CHANNEL_BUFFER_BYTES, 0);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < (ssize_t)sizeof(struct fuse_out_header))
            break;
        struct fuse_out_header *header = (void *)message;
        if (header->unique && header->unique == atomic_load(&channel->init_unique)) {
            atomic_store(&channel->init_unique, 0);
            length = (ssize_t)extend_init(channel, message, (size_t)length, CHANNEL_BUFFER_BYTES);
        } else if (header->unique) {
            length = (ssize_t)complete(channel, message, (size_t)length);
        }
        if (write(channel->device, message, (size_t)length) < 0)
            atomic_fetch_add(&channel->reply_errors, 1);
    }
    free(message);
    return NULL;
}
