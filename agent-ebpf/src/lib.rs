//! The event layout that the BPF programs write and the agent reads.
//!
//! Everything both sides must agree on is here and nowhere else: names of programs and maps, the records in
//! the ring buffer, the configuration, the counters. All integers are in the host's byte order: a record
//! never leaves the machine that wrote it.
#![no_std]
#![forbid(unsafe_code)]

use core::mem::{offset_of, size_of};

/// Names of the programs in the object.
pub mod program {
    /// Entry uprobe on `zmq_msg_send(zmq_msg_t *msg, void *socket, int flags)`.
    ///
    /// It reads the three arguments from their registers, so it may also be attached some instructions behind
    /// the entry, as long as those registers still hold the arguments.
    pub const ZMQ_MSG_SEND: &str = "zmq_msg_send";
    /// Entry uprobe on `shm_open(const char *name, int oflag, mode_t mode)`, or some instructions behind it.
    pub const SHM_OPEN: &str = "shm_open";
    /// Entry uprobe on `shm_unlink(const char *name)`, or some instructions behind it.
    pub const SHM_UNLINK: &str = "shm_unlink";
    /// Uprobe in `ftruncate(int fd, off_t length)`, behind its system call: it reads the result and the
    /// length.
    pub const FTRUNCATE: &str = "ftruncate";
    /// Uprobe in `flock(int fd, int operation)`, behind its system call: it reads the result and the
    /// operation.
    pub const FLOCK: &str = "flock";
    /// The four that watch segments of shared memory.
    pub const SHM: [&str; 4] = [SHM_OPEN, SHM_UNLINK, FTRUNCATE, FLOCK];
    /// Entry uprobe on `mooncake::RealClient::put`, or some instructions behind it: it reads the second and fourth
    /// argument.
    pub const STORE_PUT: &str = "store_put";
    /// Entry uprobe on `mooncake::RealClient::get_buffer`, whose result is an object: it reads where that goes, and
    /// the key.
    pub const STORE_GET: &str = "store_get";
    /// Uprobe on the returns of both.
    pub const STORE_RETURN: &str = "store_return";
    /// The three that watch Mooncake's store.
    pub const STORE: [&str; 3] = [STORE_PUT, STORE_GET, STORE_RETURN];
    /// Entry uprobe on `datasystem::object_cache::ObjectClientImpl::Set`, whose result is an object, or some
    /// instructions behind it: it reads where that goes, the key and the value's length.
    pub const YUANRONG_SET: &str = "yuanrong_set";
    /// Entry uprobe on `datasystem::object_cache::ObjectClientImpl::Get`, in the same way: it reads where the result
    /// goes, and the first key.
    pub const YUANRONG_GET: &str = "yuanrong_get";
    /// Uprobe on the returns of both.
    pub const YUANRONG_RETURN: &str = "yuanrong_return";
    /// The three that watch Yuanrong's data system.
    pub const YUANRONG: [&str; 3] = [YUANRONG_SET, YUANRONG_GET, YUANRONG_RETURN];
    /// Uprobe in `read` and `recv`, behind the system call: result and arguments are in their registers (x86-64).
    /// The same holds for the programs up to [`HTTP_SYSCALL`].
    pub const HTTP_READ: &str = "http_read";
    /// Uprobe in `write` and `send`.
    pub const HTTP_WRITE: &str = "http_write";
    /// Uprobe in `writev`.
    pub const HTTP_WRITEV: &str = "http_writev";
    /// Uprobe in `sendmsg`.
    pub const HTTP_SENDMSG: &str = "http_sendmsg";
    /// Uprobe in `accept4`.
    pub const HTTP_ACCEPT: &str = "http_accept";
    /// Uprobe in `close`, in front of the system call or behind it: it reads the descriptor alone.
    pub const HTTP_CLOSE: &str = "http_close";
    /// Uprobe in `syscall`, by which libuv closes.
    pub const HTTP_SYSCALL: &str = "http_syscall";
    /// Entry uprobe on the same, for aarch64.
    pub const HTTP_SYSCALL_ENTRY: &str = "http_syscall_entry";
    /// Uprobe in `read` and `recv`, in front of the system call: it notes the arguments for [`HTTP_RETURN`]. The
    /// same holds for the programs up to [`HTTP_NOTE_ACCEPT`].
    pub const HTTP_NOTE_READ: &str = "http_note_read";
    /// Uprobe in `write` and `send`.
    pub const HTTP_NOTE_WRITE: &str = "http_note_write";
    /// Uprobe in `writev`.
    pub const HTTP_NOTE_WRITEV: &str = "http_note_writev";
    /// Uprobe in `sendmsg`.
    pub const HTTP_NOTE_SENDMSG: &str = "http_note_sendmsg";
    /// Uprobe in `accept4`.
    pub const HTTP_NOTE_ACCEPT: &str = "http_note_accept";
    /// Uprobe behind a system call whose arguments were noted: it reads the result alone.
    pub const HTTP_RETURN: &str = "http_return";
    /// Those that watch HTTP connections.
    pub const HTTP: [&str; 14] = [
        HTTP_READ,
        HTTP_WRITE,
        HTTP_WRITEV,
        HTTP_SENDMSG,
        HTTP_ACCEPT,
        HTTP_CLOSE,
        HTTP_SYSCALL,
        HTTP_SYSCALL_ENTRY,
        HTTP_NOTE_READ,
        HTTP_NOTE_WRITE,
        HTTP_NOTE_WRITEV,
        HTTP_NOTE_SENDMSG,
        HTTP_NOTE_ACCEPT,
        HTTP_RETURN,
    ];
    /// Entry uprobe on `SSL_read_ex(SSL *ssl, void *buf, size_t num, size_t *readbytes)`, or some instructions behind
    /// it: it notes the arguments for [`HTTP_TLS_READ`].
    pub const HTTP_NOTE_TLS_READ: &str = "http_note_tls_read";
    /// Uprobe on each return of the same.
    pub const HTTP_TLS_READ: &str = "http_tls_read";
    /// Entry uprobe on `SSL_write_ex(SSL *ssl, const void *buf, size_t num, size_t *written)`, or some instructions
    /// behind it.
    pub const HTTP_TLS_WRITE: &str = "http_tls_write";
    /// Entry uprobe on `SSL_free(SSL *ssl)`, or some instructions behind it.
    pub const HTTP_TLS_FREE: &str = "http_tls_free";
    /// Those that watch HTTP connections which libssl encrypts.
    pub const HTTP_TLS: [&str; 4] = [HTTP_NOTE_TLS_READ, HTTP_TLS_READ, HTTP_TLS_WRITE, HTTP_TLS_FREE];
    /// Raw tracepoint `sched_process_exec`: every exec on the host, for discovery.
    pub const PROCESS_EXEC: &str = "process_exec";
    /// Raw tracepoint `task_newtask`: new processes (not threads) of watched parents.
    pub const PROCESS_FORK: &str = "process_fork";
    /// Raw tracepoint `sched_process_exit`: ends of the main threads of watched processes.
    pub const PROCESS_EXIT: &str = "process_exit";

    /// Each raw tracepoint program with the tracepoint it belongs to.
    ///
    /// Raw tracepoints need no tracefs and no field offsets, which differ between kernels (the pids
    /// of `sched_process_fork` lie at other places in 6.18 than in 6.1).
    pub const TRACEPOINTS: [(&str, &str); 3] = [
        (PROCESS_EXEC, "sched_process_exec"),
        (PROCESS_FORK, "task_newtask"),
        (PROCESS_EXIT, "sched_process_exit"),
    ];
}

/// Names of the maps in the object.
pub mod map {
    /// Ring buffer of all records, in the order of their reservation. Its size may be set at load time.
    pub const EVENTS: &str = "EVENTS";
    /// Array of `u64` with the [`watch`](crate::watch) flags of every process id; see
    /// [`watch::place`](crate::watch::place).
    pub const WATCHED: &str = "WATCHED";
    /// Per-CPU array of `u64`, indexed by [`Counter`](crate::Counter).
    pub const COUNTERS: &str = "COUNTERS";
    /// Multipart messages of which the payload has been seen and the last part has not. Kernel side only.
    pub const MESSAGES: &str = "MESSAGES";
    /// What threads are doing with shared memory. Kernel side only.
    pub const THREADS: &str = "THREADS";
    /// HTTP connections, as a hash of `u64` by [`connection`](crate::connection). The agent removes those of
    /// processes that it watches no more.
    pub const CONNECTIONS: &str = "CONNECTIONS";
    /// Arguments of the calls that threads are in. Kernel side only.
    pub const CALLS: &str = "CALLS";
}

/// Names of the settings in the object, [`Config`]'s fields. The loader sets them before it loads the programs.
pub mod global {
    /// [`Config::capture_limit`](crate::Config::capture_limit), as `u32`.
    pub const CAPTURE_LIMIT: &str = "CAPTURE_LIMIT";
    /// [`Config::wakeup_bytes`](crate::Config::wakeup_bytes), as `u32`.
    pub const WAKEUP_BYTES: &str = "WAKEUP_BYTES";
}

/// Flags in the `WATCHED` map.
///
/// The map is a table of bits over all process ids (2 MiB), not a hash of the few watched ones: in a hit of
/// the probe, where caches are cold, a look into a hash costs 90 ns, a load from an array 20.
pub mod watch {
    /// Frames that the process hands to `zmq_msg_send` are captured.
    pub const FRAMES: u64 = 1;
    /// Forks and the end of the process are reported.
    pub const LIFE: u64 = 2;
    /// What the process does with segments of shared memory, and with Mooncake's store, is followed.
    pub const SHM: u64 = 4;
    /// What the process reads from and writes to its HTTP connections is captured.
    pub const HTTP: u64 = 8;

    /// Process ids are below this on 64-bit kernels (`PID_MAX_LIMIT` of include/linux/threads.h).
    pub const PIDS: u32 = 4 << 20;
    /// Bits that a process has in its word: one for each flag.
    const BITS: u32 = 4;
    const PIDS_A_WORD: u32 = u64::BITS / BITS;
    /// Entries of the map.
    pub const WORDS: u32 = PIDS / PIDS_A_WORD;

    /// Where the flags of a process are: the map's entry, and by how many bits they are shifted in it.
    #[inline]
    #[must_use]
    pub const fn place(tgid: u32) -> (u32, u32) {
        (tgid / PIDS_A_WORD, tgid % PIDS_A_WORD * BITS)
    }
}

/// Flags of a frame record.
pub mod flag {
    /// More parts of the same message follow (`ZMQ_SNDMORE`).
    pub const MORE: u32 = 1;
    /// A part behind the payload of its message: header only.
    pub const AUX: u32 = 2;
    /// The content could not be read (a page not present): header only. Also counted.
    pub const UNREADABLE: u32 = 4;
}

/// A part with MORE that is at most this long and comes before the payload is a prefix: an identity, an
/// empty delimiter, a request type. The payload is the first part that is longer, or the last part.
///
/// Prefixes are captured as frames of their own. The shortest payload that has parts behind it is an output
/// with a tensor, over 60 bytes.
pub const PREFIX_MAX: u64 = 32;

/// A multipart message whose last part has not come after this time counts as given up: its sender got an
/// error, or the kernel missed a hit of the probe. In nanoseconds.
pub const MESSAGE_TIMEOUT_NS: u64 = 1_000_000_000;

/// Smallest value of [`Config::capture_limit`]: shorter frames need not look what it is.
pub const CAPTURE_LIMIT_MIN: u32 = 1024;
/// Largest and default value of [`Config::capture_limit`].
pub const CAPTURE_LIMIT_MAX: u32 = 64 * 1024;
/// Most bytes that are kept of the end of a frame larger than the capture limit.
pub const TAIL_MAX: u32 = 4096;
/// Bytes of content that a frame record has room for: the smallest that fits is taken.
pub const SIZE_CLASSES: [u32; 6] = [64, 256, 1024, 4096, 16 * 1024, 64 * 1024];

/// Bytes of content that an HTTP record has room for: the smallest that fits is taken.
pub const HTTP_CLASSES: [usize; 3] = [128, 512, 2560];
/// Of what was received: bytes of the head and of the tail, where it is longer than both together.
pub const HTTP_RECEIVED_HEAD: usize = 2048;
/// See [`HTTP_RECEIVED_HEAD`].
pub const HTTP_RECEIVED_TAIL: usize = 512;
/// Of what was sent: bytes of the head and of the tail, where it is longer than both together.
pub const HTTP_SENT_HEAD: usize = 1024;
/// See [`HTTP_SENT_HEAD`].
pub const HTTP_SENT_TAIL: usize = 1024;

/// The key of a connection in the `CONNECTIONS` map.
#[must_use]
pub const fn connection(tgid: u32, fd: i32) -> u64 {
    (tgid as u64) << 32 | fd.cast_unsigned() as u64
}

/// Smallest record that looks how full the ring is, with its header; see [`Config::wakeup_bytes`].
pub const WAKEUP_RECORD_MIN: u32 = 4096;

/// Settings of the programs, given to them before they are loaded (see [`global`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most bytes of a frame that are captured, from [`CAPTURE_LIMIT_MIN`] to [`CAPTURE_LIMIT_MAX`].
    ///
    /// A longer frame gives its last `min(capture_limit / 4, TAIL_MAX)` bytes as tail, and as many of its
    /// first bytes as the rest of the limit allows.
    pub capture_limit: u32,
    /// When the reader is woken: by a record of at least [`WAKEUP_RECORD_MIN`] bytes that finds this many
    /// unread bytes in the ring. For the rest the reader looks by itself, on a timer: a wake-up is at the
    /// sender's cost, measured at 7 us, ten times that of the record. Keep it well below the size of the ring.
    pub wakeup_bytes: u32,
}

/// What a record is about: its first four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Kind {
    /// A frame handed to `zmq_msg_send`: [`FrameHeader`], then head, then tail.
    Frame = 1,
    /// A process called exec: [`ProcessRecord`].
    Exec = 2,
    /// A watched process made a child: [`ProcessRecord`] of the parent. The child is found in /proc, as its
    /// pid would need a read of kernel memory, which lockdown forbids.
    Fork = 3,
    /// The main thread of a watched process ended: [`ProcessRecord`]. Its other threads may outlive it.
    Exit = 4,
    /// A step of a thread that puts or takes a segment of shared memory: [`ShmHeader`], then the name.
    Shm = 5,
    /// What a process did with an HTTP connection: [`HttpHeader`], then head, then tail.
    Http = 6,
}

/// Start of a frame record. The head follows at once, the tail follows the head.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// [`Kind::Frame`].
    pub kind: u32,
    /// [`flag`] bits.
    pub flags: u32,
    /// `CLOCK_MONOTONIC` at the call, in nanoseconds (`bpf_ktime_get_ns`).
    pub time_ns: u64,
    /// Sending process (initial PID namespace).
    pub tgid: u32,
    /// Sending thread.
    pub tid: u32,
    /// Address of the libzmq socket in that process.
    pub socket: u64,
    /// Address of the content in that process.
    pub content: u64,
    /// Size of the whole frame in bytes.
    pub size: u64,
    /// Captured bytes of its start.
    pub head_len: u32,
    /// Captured bytes of its end; 0 where the head is the whole frame.
    pub tail_len: u32,
}

/// The record of [`Kind::Exec`], [`Kind::Fork`] and [`Kind::Exit`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessRecord {
    /// One of the three kinds.
    pub kind: u32,
    /// The process (initial PID namespace).
    pub tgid: u32,
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub time_ns: u64,
}

/// What a thread did with a segment of shared memory.
///
/// Only what belongs to a hop gives a record: a creation under a lock, every removal, and the end of what was
/// begun. A lock is one of `flock`, exclusive, on any file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ShmStep {
    /// `shm_open` with `O_CREAT` while the thread holds a lock that it waited for: a put begins, unless it
    /// fails as the name is taken; then further steps of this kind may follow. `start_ns` is when the lock was
    /// got.
    Create = 1,
    /// `shm_unlink` while the thread holds a lock that it got without waiting: a get has copied the segment.
    /// `start_ns` is when the segment was opened, or the lock was got where no open is known.
    Take = 2,
    /// Any other `shm_unlink`.
    Unlink = 3,
    /// The lock is released after a [`ShmStep::Create`] whose segment was given a size, which is `size`, or
    /// after a [`ShmStep::Take`]. It has no name.
    Done = 4,
    /// A store has taken an object: a whole put, from `start_ns` on, of `size` bytes. The name is its key.
    StorePut = 5,
    /// A store has given an object: a whole get, from `start_ns` on. The name is its key.
    StoreGet = 6,
}

impl ShmStep {
    fn of(step: u32) -> Option<Self> {
        [
            Self::Create,
            Self::Take,
            Self::Unlink,
            Self::Done,
            Self::StorePut,
            Self::StoreGet,
        ]
        .into_iter()
        .find(|known| *known as u32 == step)
    }
}

/// Room for the name in a record; a name may be cut there, behind all that a file system allows.
pub const SHM_NAME_ROOM: usize = 264;
/// Room for an object's key in a record; what has a longer one is no stage's.
pub const STORE_NAME_ROOM: usize = 512;

/// Start of a record of [`Kind::Shm`]. The name follows at once, as the thread gave it: with its slash.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmHeader {
    /// [`Kind::Shm`].
    pub kind: u32,
    /// A [`ShmStep`].
    pub step: u32,
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub time_ns: u64,
    /// The process (initial PID namespace).
    pub tgid: u32,
    /// The thread.
    pub tid: u32,
    /// When it began; 0 where the step says nothing of it.
    pub start_ns: u64,
    /// The segment's size; 0 where the step says nothing of it.
    pub size: u64,
    /// Bytes of the name.
    pub name_len: u32,
    /// Nothing.
    pub reserved: u32,
}

/// What a process did with an HTTP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum HttpOp {
    /// It accepted the connection. What comes through it need not be HTTP.
    Accepted = 1,
    /// Bytes came in; size 0: the other side has ended its part.
    Received = 2,
    /// Bytes went out.
    Sent = 3,
    /// Receiving or sending failed; the size is the error number. Calls that are to be tried again are no failure.
    Failed = 4,
    /// It closed the connection.
    Closed = 5,
    /// What came first is not HTTP, or the process spoke first: no more will be told of the connection. The size is
    /// the first eight bytes that came, little endian, 0 where none came.
    Foreign = 6,
}

impl HttpOp {
    fn of(op: u32) -> Option<Self> {
        [
            Self::Accepted,
            Self::Received,
            Self::Sent,
            Self::Failed,
            Self::Closed,
            Self::Foreign,
        ]
        .into_iter()
        .find(|known| *known as u32 == op)
    }
}

/// Start of a record of [`Kind::Http`]. The head follows at once, the tail follows the head.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpHeader {
    /// [`Kind::Http`].
    pub kind: u32,
    /// An [`HttpOp`].
    pub op: u32,
    /// `CLOCK_MONOTONIC` behind the call, in nanoseconds.
    pub time_ns: u64,
    /// The process (initial PID namespace).
    pub tgid: u32,
    /// The thread.
    pub tid: u32,
    /// Bytes that came in or went out; else what the operation says.
    pub size: u64,
    /// The connection: its descriptor, or a negative number that stands for one which libssl encrypts.
    pub fd: i32,
    /// Captured bytes of the start.
    pub head_len: u32,
    /// Captured bytes of the end; 0 where the head is all.
    pub tail_len: u32,
    /// Nothing.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<HttpHeader>() == 48);
    assert!(offset_of!(HttpHeader, time_ns) == 8 && offset_of!(HttpHeader, tgid) == 16);
    assert!(offset_of!(HttpHeader, tid) == 20 && offset_of!(HttpHeader, size) == 24);
    assert!(offset_of!(HttpHeader, fd) == 32 && offset_of!(HttpHeader, head_len) == 36);
    assert!(offset_of!(HttpHeader, tail_len) == 40);
    assert!(size_of::<ShmHeader>() == 48);
    assert!(offset_of!(ShmHeader, time_ns) == 8 && offset_of!(ShmHeader, tgid) == 16);
    assert!(offset_of!(ShmHeader, tid) == 20 && offset_of!(ShmHeader, start_ns) == 24);
    assert!(offset_of!(ShmHeader, size) == 32 && offset_of!(ShmHeader, name_len) == 40);
    assert!(size_of::<FrameHeader>() == 56);
    assert!(offset_of!(FrameHeader, time_ns) == 8 && offset_of!(FrameHeader, tgid) == 16);
    assert!(offset_of!(FrameHeader, tid) == 20 && offset_of!(FrameHeader, socket) == 24);
    assert!(offset_of!(FrameHeader, content) == 32 && offset_of!(FrameHeader, size) == 40);
    assert!(offset_of!(FrameHeader, head_len) == 48 && offset_of!(FrameHeader, tail_len) == 52);
    assert!(size_of::<ProcessRecord>() == 16 && offset_of!(ProcessRecord, time_ns) == 8);
};

/// Index into the `COUNTERS` map.
///
/// Each hit of the frame probe ends in exactly one of those up to [`Counter::LostUnknownType`], so their sum is
/// the number of hits. Likewise each hit of the four shared memory probes in one of those from
/// [`Counter::ShmCaptured`] to [`Counter::ShmNotKept`], and each of the HTTP probes in one of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Counter {
    /// Frames written to the ring with content (prefixes and payloads).
    Captured = 0,
    /// Parts behind a payload, written as header only.
    Aux = 1,
    /// Frames of at most one byte without MORE, dropped on purpose: wake-ups and notifications. Whether the
    /// process is watched need not be known for that.
    Short = 2,
    /// Other frames of a process that is not in `WATCHED`.
    Unwatched = 3,
    /// Frames lost because the ring was full.
    LostRingFull = 4,
    /// Frames lost, or written without content, because the sender's memory could not be read.
    LostUnreadable = 5,
    /// Frames lost because their `zmq_msg_t` has a type or size that no known libzmq makes.
    LostUnknownType = 6,
    /// Multipart messages that could not be remembered: parts behind their payload count as frames.
    MessageNotKept = 7,
    /// Exec, fork and exit records written.
    Process = 8,
    /// Exec, fork and exit records lost because the ring was full.
    LostProcess = 9,
    /// Steps of hops through shared memory written to the ring.
    ShmCaptured = 10,
    /// Calls of the shared memory probes' functions that only changed what is known of their thread: polls for
    /// a segment that is not there yet, nearly all of them.
    ShmNoted = 11,
    /// Other calls of those functions, which tell nothing of a hop: failures, other kinds of locks, segments
    /// made without a lock, processes that are not watched.
    ShmIgnored = 12,
    /// Steps lost because the ring was full.
    LostShmRingFull = 13,
    /// Steps lost because the name could not be read.
    LostShmUnreadable = 14,
    /// Steps lost because the thread could not be remembered.
    ShmNotKept = 15,
    /// What processes did with HTTP connections, written to the ring.
    HttpCaptured = 16,
    /// Calls in front of which their arguments were noted.
    HttpNoted = 17,
    /// Other calls of the probed functions: other descriptors than HTTP connections, calls to be tried again,
    /// processes that are not watched.
    HttpIgnored = 18,
    /// Events of HTTP connections lost because the ring was full.
    LostHttpRingFull = 19,
    /// Events of HTTP connections written without content, because that could not be read.
    LostHttpUnreadable = 20,
    /// Connections, or calls, that could not be remembered.
    HttpNotKept = 21,
    /// Calls of a store's functions that begin where the end of the one before in that thread was not seen: it left by
    /// an exception, or by a jump to another function, as a put of Mooncake does that failed.
    StoreUnreturned = 22,
}

impl Counter {
    /// All of them, in the order of their index.
    pub const ALL: [Self; 23] = [
        Self::Captured,
        Self::Aux,
        Self::Short,
        Self::Unwatched,
        Self::LostRingFull,
        Self::LostUnreadable,
        Self::LostUnknownType,
        Self::MessageNotKept,
        Self::Process,
        Self::LostProcess,
        Self::ShmCaptured,
        Self::ShmNoted,
        Self::ShmIgnored,
        Self::LostShmRingFull,
        Self::LostShmUnreadable,
        Self::ShmNotKept,
        Self::HttpCaptured,
        Self::HttpNoted,
        Self::HttpIgnored,
        Self::LostHttpRingFull,
        Self::LostHttpUnreadable,
        Self::HttpNotKept,
        Self::StoreUnreturned,
    ];

    /// The label value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Captured => "captured",
            Self::Aux => "aux",
            Self::Short => "short",
            Self::Unwatched => "unwatched",
            Self::LostRingFull => "ring_full",
            Self::LostUnreadable => "unreadable",
            Self::LostUnknownType => "unknown_type",
            Self::MessageNotKept => "message_not_kept",
            Self::Process => "process",
            Self::LostProcess => "process_ring_full",
            Self::ShmCaptured => "shm_captured",
            Self::ShmNoted => "shm_noted",
            Self::ShmIgnored => "shm_ignored",
            Self::LostShmRingFull => "shm_ring_full",
            Self::LostShmUnreadable => "shm_unreadable",
            Self::ShmNotKept => "shm_not_kept",
            Self::HttpCaptured => "http_captured",
            Self::HttpNoted => "http_noted",
            Self::HttpIgnored => "http_ignored",
            Self::LostHttpRingFull => "http_ring_full",
            Self::LostHttpUnreadable => "http_unreadable",
            Self::HttpNotKept => "http_not_kept",
            Self::StoreUnreturned => "store_unreturned",
        }
    }

    /// Whether it counts hits of a probe that went as they should.
    #[must_use]
    pub fn is_hit(self) -> bool {
        !self.is_loss() && self != Self::Process
    }

    /// Whether it counts something that the agent should have got and did not.
    #[must_use]
    pub fn is_loss(self) -> bool {
        match self {
            Self::Captured
            | Self::Aux
            | Self::Short
            | Self::Unwatched
            | Self::Process
            | Self::ShmCaptured
            | Self::ShmNoted
            | Self::ShmIgnored
            | Self::HttpCaptured
            | Self::HttpNoted
            | Self::HttpIgnored
            | Self::StoreUnreturned => false,
            Self::LostRingFull
            | Self::LostUnreadable
            | Self::LostUnknownType
            | Self::MessageNotKept
            | Self::LostProcess
            | Self::LostShmRingFull
            | Self::LostShmUnreadable
            | Self::ShmNotKept
            | Self::LostHttpRingFull
            | Self::LostHttpUnreadable
            | Self::HttpNotKept => true,
        }
    }
}

/// A record, borrowed from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A frame.
    Frame {
        /// Its header.
        header: FrameHeader,
        /// Captured bytes of its start: the whole frame where it is as long as `header.size`.
        head: &'a [u8],
        /// Captured bytes of its end.
        tail: &'a [u8],
    },
    /// An exec, fork or exit.
    Process(Kind, ProcessRecord),
    /// A step with shared memory.
    Shm {
        /// The step that its header names.
        step: ShmStep,
        /// Its header.
        header: ShmHeader,
        /// The name, empty where the step has none.
        name: &'a [u8],
    },
    /// Something done with an HTTP connection.
    Http {
        /// What its header says was done.
        op: HttpOp,
        /// Its header.
        header: HttpHeader,
        /// Captured bytes of the start: all where they are as long as `header.size`.
        head: &'a [u8],
        /// Captured bytes of the end.
        tail: &'a [u8],
    },
}

/// Why bytes are no record: the object and the agent are of different builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// Shorter than its own header says.
    Short {
        /// Bytes that it would need.
        needed: usize,
        /// Bytes that there are.
        len: usize,
    },
    /// Its first four bytes name no kind.
    UnknownKind(u32),
    /// A step with shared memory that is none.
    UnknownStep(u32),
    /// Something done with an HTTP connection that is nothing known.
    UnknownOp(u32),
}

impl core::fmt::Display for RecordError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Short { needed, len } => write!(f, "record of {len} bytes needs {needed}"),
            Self::UnknownKind(kind) => write!(f, "record of unknown kind {kind}"),
            Self::UnknownStep(step) => write!(f, "record of unknown step {step}"),
            Self::UnknownOp(op) => write!(f, "record of unknown operation {op}"),
        }
    }
}

impl core::error::Error for RecordError {}

impl<'a> Record<'a> {
    /// Takes one item of the ring apart. Room behind the captured bytes is ignored.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, RecordError> {
        let kind = u32_at(bytes, 0)?;
        if kind == Kind::Frame as u32 {
            let header = FrameHeader {
                kind,
                flags: u32_at(bytes, offset_of!(FrameHeader, flags))?,
                time_ns: u64_at(bytes, offset_of!(FrameHeader, time_ns))?,
                tgid: u32_at(bytes, offset_of!(FrameHeader, tgid))?,
                tid: u32_at(bytes, offset_of!(FrameHeader, tid))?,
                socket: u64_at(bytes, offset_of!(FrameHeader, socket))?,
                content: u64_at(bytes, offset_of!(FrameHeader, content))?,
                size: u64_at(bytes, offset_of!(FrameHeader, size))?,
                head_len: u32_at(bytes, offset_of!(FrameHeader, head_len))?,
                tail_len: u32_at(bytes, offset_of!(FrameHeader, tail_len))?,
            };
            let tail_at = size_of::<FrameHeader>().saturating_add(header.head_len as usize);
            return Ok(Self::Frame {
                header,
                head: slice(bytes, size_of::<FrameHeader>(), header.head_len as usize)?,
                tail: slice(bytes, tail_at, header.tail_len as usize)?,
            });
        }
        if kind == Kind::Shm as u32 {
            let header = ShmHeader {
                kind,
                step: u32_at(bytes, offset_of!(ShmHeader, step))?,
                time_ns: u64_at(bytes, offset_of!(ShmHeader, time_ns))?,
                tgid: u32_at(bytes, offset_of!(ShmHeader, tgid))?,
                tid: u32_at(bytes, offset_of!(ShmHeader, tid))?,
                start_ns: u64_at(bytes, offset_of!(ShmHeader, start_ns))?,
                size: u64_at(bytes, offset_of!(ShmHeader, size))?,
                name_len: u32_at(bytes, offset_of!(ShmHeader, name_len))?,
                reserved: u32_at(bytes, offset_of!(ShmHeader, reserved))?,
            };
            return Ok(Self::Shm {
                step: ShmStep::of(header.step).ok_or(RecordError::UnknownStep(header.step))?,
                header,
                name: slice(bytes, size_of::<ShmHeader>(), header.name_len as usize)?,
            });
        }
        if kind == Kind::Http as u32 {
            let header = HttpHeader {
                kind,
                op: u32_at(bytes, offset_of!(HttpHeader, op))?,
                time_ns: u64_at(bytes, offset_of!(HttpHeader, time_ns))?,
                tgid: u32_at(bytes, offset_of!(HttpHeader, tgid))?,
                tid: u32_at(bytes, offset_of!(HttpHeader, tid))?,
                size: u64_at(bytes, offset_of!(HttpHeader, size))?,
                fd: u32_at(bytes, offset_of!(HttpHeader, fd))?.cast_signed(),
                head_len: u32_at(bytes, offset_of!(HttpHeader, head_len))?,
                tail_len: u32_at(bytes, offset_of!(HttpHeader, tail_len))?,
                reserved: u32_at(bytes, offset_of!(HttpHeader, reserved))?,
            };
            let tail_at = size_of::<HttpHeader>().saturating_add(header.head_len as usize);
            return Ok(Self::Http {
                op: HttpOp::of(header.op).ok_or(RecordError::UnknownOp(header.op))?,
                header,
                head: slice(bytes, size_of::<HttpHeader>(), header.head_len as usize)?,
                tail: slice(bytes, tail_at, header.tail_len as usize)?,
            });
        }
        let known = match kind {
            k if k == Kind::Exec as u32 => Kind::Exec,
            k if k == Kind::Fork as u32 => Kind::Fork,
            k if k == Kind::Exit as u32 => Kind::Exit,
            k => return Err(RecordError::UnknownKind(k)),
        };
        let record = ProcessRecord {
            kind,
            tgid: u32_at(bytes, offset_of!(ProcessRecord, tgid))?,
            time_ns: u64_at(bytes, offset_of!(ProcessRecord, time_ns))?,
        };
        Ok(Self::Process(known, record))
    }
}

fn slice(bytes: &[u8], at: usize, len: usize) -> Result<&[u8], RecordError> {
    let end = at.saturating_add(len);
    bytes.get(at..end).ok_or(RecordError::Short {
        needed: end,
        len: bytes.len(),
    })
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], RecordError> {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .ok_or(RecordError::Short {
            needed: at.saturating_add(N),
            len: bytes.len(),
        })
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, RecordError> {
    array(bytes, at).map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, RecordError> {
    array(bytes, at).map(u64::from_ne_bytes)
}
