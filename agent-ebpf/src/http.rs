//! What a process reads from and writes to its HTTP connections.
//!
//! A probe behind the system call of a libc function sees result and arguments at once, on x86-64. Where the two
//! are never in the registers together (aarch64, glibc 2.41 and newer), a probe in front of the call notes the
//! arguments, and one behind it takes them up: `http_note_*` and `http_return`. Both ways end in the same
//! functions here, which take a [`Call`].
//!
//! What libssl encrypts is taken from it in plaintext, where Python's `_ssl` calls it.
//!
//! Event loops read and write far more than connections: their own eventfds, pipes, sockets of libzmq. What is
//! none of the process's HTTP connections is left with one lookup.

use aya_ebpf::{
    EbpfContext as _,
    bindings::pt_regs,
    helpers::{bpf_get_current_pid_tgid, generated::bpf_probe_read_user},
    macros::{map, uprobe},
    maps::LruHashMap,
    programs::{ProbeContext, RetProbeContext},
};
use omnitap_ebpf::{
    Counter, HTTP_CLASSES, HTTP_RECEIVED_HEAD, HTTP_RECEIVED_TAIL, HTTP_SENT_HEAD, HTTP_SENT_TAIL,
    HttpHeader, HttpOp, Kind, watch,
};

use crate::maps::{EVENTS, count, is_watched, now, wakeup};

// Of errno-base.h: the call is tried again.
const EINTR: i64 = -4;
const EAGAIN: i64 = -11;

/// Shorter reads adopt no connection: no request is that short, and the reads of eventfds are.
const REQUEST_MIN: i64 = 16;

// States of a connection.
/// Accepted; nothing was read yet.
const NEW: u64 = 0;
/// What was read first is HTTP.
const OPEN: u64 = 1;

/// The state of each known connection, by process and descriptor. One that was evicted comes back with its next
/// request. The agent removes those of a process that it watches no more.
#[map]
static CONNECTIONS: LruHashMap<u64, u64> = LruHashMap::with_max_entries(16_384, 0);

/// Arguments of the call that a thread is in.
#[repr(C)]
struct Noted {
    /// [`NOTHING`], or which call it is.
    call: u64,
    args: [u64; 4],
}

// Calls whose arguments are noted.
const NOTHING: u64 = 0;
const READ: u64 = 1;
const WRITE: u64 = 2;
const WRITEV: u64 = 3;
const SENDMSG: u64 = 4;
const ACCEPT: u64 = 5;
const TLS_READ: u64 = 6;

/// By process and thread. Those of the past are evicted.
#[map]
static CALLS: LruHashMap<u64, Noted> = LruHashMap::with_max_entries(8192, 0);

static NO_CALL: Noted = Noted {
    call: NOTHING,
    args: [0; 4],
};

/// A call of libc that has returned from the kernel.
trait Call: Copy {
    fn arg(self, n: usize) -> u64;
    fn result(self) -> i64;
}

/// All of it is in the registers.
#[derive(Clone, Copy)]
struct InRegisters(*mut pt_regs);

impl Call for InRegisters {
    #[inline(always)]
    fn arg(self, n: usize) -> u64 {
        ProbeContext::new(anew(self.0).cast()).arg(n).unwrap_or(0)
    }

    #[inline(always)]
    fn result(self) -> i64 {
        RetProbeContext::new(anew(self.0).cast()).ret::<u64>() as i64
    }
}

/// The result is in its register, the arguments were noted.
#[derive(Clone, Copy)]
struct InNote(*mut pt_regs, *const Noted);

impl Call for InNote {
    #[inline(always)]
    fn arg(self, n: usize) -> u64 {
        // SAFETY: a value of the map, which only its thread writes; `n` is a constant below 4.
        unsafe { (&raw const (*anew(self.1.cast_mut())).args[n]).read_volatile() }
    }

    #[inline(always)]
    fn result(self) -> i64 {
        InRegisters(self.0).result()
    }
}

/// `SSL_read_ex`, which has returned: the third argument is the size that it told.
#[derive(Clone, Copy)]
struct Decrypted(*const Noted);

impl Call for Decrypted {
    #[inline(always)]
    fn arg(self, n: usize) -> u64 {
        InNote(core::ptr::null_mut(), self.0).arg(n)
    }

    #[inline(always)]
    fn result(self) -> i64 {
        self.arg(2) as i64
    }
}

/// `SSL_write_ex`, at its entry: it takes all that it is given, as what it makes of that goes into memory.
#[derive(Clone, Copy)]
struct Encrypted(*mut pt_regs);

impl Call for Encrypted {
    #[inline(always)]
    fn arg(self, n: usize) -> u64 {
        let value = InRegisters(self.0).arg(n);
        if n == 0 { tls_connection(value) } else { value }
    }

    #[inline(always)]
    fn result(self) -> i64 {
        InRegisters(self.0).arg(2) as i64
    }
}

/// What stands for the descriptor of a connection that libssl encrypts: a negative number made of the address of
/// its `SSL`.
#[inline(always)]
fn tls_connection(ssl: u64) -> u64 {
    (ssl >> 4 ^ ssl >> 36) & 0x7fff_ffff | 0x8000_0000
}

/// Hides a pointer's origin, so that what it points to is loaded anew at each use: the compiler would keep it on
/// the stack, of which there is little.
#[inline(always)]
fn anew<T>(mut pointer: *mut T) -> *mut T {
    // SAFETY: no instruction is emitted.
    unsafe { core::arch::asm!("/* {0} */", inout(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}

/// As [`anew`], of a number: a comparison that only the verifier needs is kept.
#[inline(always)]
fn opaque(mut value: u64) -> u64 {
    // SAFETY: no instruction is emitted.
    unsafe { core::arch::asm!("/* {0} */", inout(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[inline(always)]
fn registers(ctx: &ProbeContext) -> InRegisters {
    InRegisters(ctx.as_ptr().cast())
}

/// Behind the system call of `ssize_t read(int fd, void *buf, size_t count)` and `recv`.
#[uprobe]
fn http_read(ctx: ProbeContext) {
    count(received(registers(&ctx)));
}

/// Behind the system call of `ssize_t write(int fd, const void *buf, size_t count)` and `send`.
#[uprobe]
fn http_write(ctx: ProbeContext) {
    count(sent(registers(&ctx)));
}

/// Behind the system call of `ssize_t writev(int fd, const struct iovec *iov, int iovcnt)`.
#[uprobe]
fn http_writev(ctx: ProbeContext) {
    count(sent_vectors(registers(&ctx), false));
}

/// Behind the system call of `ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)`.
#[uprobe]
fn http_sendmsg(ctx: ProbeContext) {
    count(sent_vectors(registers(&ctx), true));
}

/// Behind the system call of `accept4`.
#[uprobe]
fn http_accept(ctx: ProbeContext) {
    count(accepted(registers(&ctx)));
}

/// In `int close(int fd)`, in front of its system call or behind it: whatever that says, the descriptor is gone.
#[uprobe]
fn http_close(ctx: ProbeContext) {
    count(closed(registers(&ctx).arg(0)));
}

/// Behind the system call of `long syscall(long number, ...)`, on x86-64: the number is lost, and the arguments have
/// moved up. A call that gives 0 and has a known connection as its first argument closed it.
#[uprobe]
fn http_syscall(ctx: ProbeContext) {
    let call = registers(&ctx);
    count(if call.result() == 0 {
        closed(call.arg(0))
    } else {
        Counter::HttpIgnored
    });
}

/// Entry of the same, on aarch64: behind the system call its result has the place of the first argument.
#[uprobe]
fn http_syscall_entry(ctx: ProbeContext) {
    /// `close` of asm-generic/unistd.h.
    const CLOSE: u64 = 57;
    let call = registers(&ctx);
    count(if call.arg(0) == CLOSE {
        closed(call.arg(1))
    } else {
        Counter::HttpIgnored
    });
}

/// In front of the system call of `read` and `recv`.
#[uprobe]
fn http_note_read(ctx: ProbeContext) {
    count(note(&ctx, READ));
}

/// In front of the system call of `write` and `send`.
#[uprobe]
fn http_note_write(ctx: ProbeContext) {
    count(note(&ctx, WRITE));
}

/// In front of the system call of `writev`.
#[uprobe]
fn http_note_writev(ctx: ProbeContext) {
    count(note(&ctx, WRITEV));
}

/// In front of the system call of `sendmsg`.
#[uprobe]
fn http_note_sendmsg(ctx: ProbeContext) {
    count(note(&ctx, SENDMSG));
}

/// In front of the system call of `accept4`.
#[uprobe]
fn http_note_accept(ctx: ProbeContext) {
    count(note(&ctx, ACCEPT));
}

/// Behind a system call whose arguments were noted, or of any other function that shares the place.
#[uprobe]
fn http_return(ctx: ProbeContext) {
    count(returned(&ctx));
}

/// Entry of `int SSL_read_ex(SSL *ssl, void *buf, size_t num, size_t *readbytes)`.
#[uprobe]
fn http_note_tls_read(ctx: ProbeContext) {
    count(note(&ctx, TLS_READ));
}

/// Return of the same.
#[uprobe]
fn http_tls_read(ctx: ProbeContext) {
    count(decrypted(&ctx));
}

/// Entry of `int SSL_write_ex(SSL *ssl, const void *buf, size_t num, size_t *written)`.
#[uprobe]
fn http_tls_write(ctx: ProbeContext) {
    count(sent(Encrypted(ctx.as_ptr().cast())));
}

/// Entry of `void SSL_free(SSL *ssl)`.
#[uprobe]
fn http_tls_free(ctx: ProbeContext) {
    count(closed(tls_connection(registers(&ctx).arg(0))));
}

#[inline(always)]
fn decrypted(ctx: &ProbeContext) -> Counter {
    let id = bpf_get_current_pid_tgid();
    let Some(noted) = CALLS.get_ptr_mut(&id) else {
        return Counter::HttpIgnored;
    };
    // SAFETY: a value of the map, which only its thread writes; the helper checks where the size comes from.
    unsafe {
        if (&raw const (*noted).call).read_volatile() != TLS_READ {
            return Counter::HttpIgnored;
        }
        (&raw mut (*noted).call).write_volatile(NOTHING);
        // 1: something was read.
        if registers(ctx).result() as i32 != 1 {
            return Counter::HttpIgnored;
        }
        let size = (&raw const (*noted).args[3]).read_volatile();
        if bpf_probe_read_user((&raw mut (*noted).args[2]).cast(), 8, size as *const _) != 0 {
            return Counter::LostHttpUnreadable;
        }
    }
    received(Decrypted(noted))
}

#[inline(always)]
fn returned(ctx: &ProbeContext) -> Counter {
    let id = bpf_get_current_pid_tgid();
    let Some(noted) = CALLS.get_ptr_mut(&id) else {
        return Counter::HttpIgnored;
    };
    let regs = ctx.as_ptr().cast();
    // SAFETY: a value of the map, which only its thread writes.
    let call = unsafe {
        let call = (&raw const (*noted).call).read_volatile();
        (&raw mut (*noted).call).write_volatile(NOTHING);
        call
    };
    let made = InNote(regs, noted);
    match call {
        READ => received(made),
        WRITE => sent(made),
        WRITEV => sent_vectors(made, false),
        SENDMSG => sent_vectors(made, true),
        ACCEPT => accepted(made),
        _ => Counter::HttpIgnored,
    }
}

#[inline(always)]
fn note(ctx: &ProbeContext, call: u64) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::HTTP) {
        return Counter::HttpIgnored;
    }
    let made = registers(ctx);
    // Only what may be the begin of a connection matters where none is known.
    if matches!(call, WRITE | WRITEV | SENDMSG) && CONNECTIONS.get_ptr_mut(key(id, made.arg(0))).is_none() {
        return Counter::HttpIgnored;
    }
    let noted = match CALLS.get_ptr_mut(&id) {
        Some(noted) => noted,
        None => {
            // Once a thread.
            if CALLS.insert(&id, &NO_CALL, 0).is_err() {
                return Counter::HttpNotKept;
            }
            let Some(noted) = CALLS.get_ptr_mut(&id) else {
                return Counter::HttpNotKept;
            };
            noted
        }
    };
    // SAFETY: a value of the map, which only its thread writes.
    unsafe {
        if call == TLS_READ {
            (&raw mut (*noted).args[0]).write_volatile(tls_connection(made.arg(0)));
            (&raw mut (*noted).args[3]).write_volatile(made.arg(3));
        } else {
            (&raw mut (*noted).args[0]).write_volatile(made.arg(0));
            (&raw mut (*noted).args[2]).write_volatile(made.arg(2));
        }
        (&raw mut (*noted).args[1]).write_volatile(made.arg(1));
        (&raw mut (*noted).call).write_volatile(call);
    }
    Counter::HttpNoted
}

#[inline(always)]
fn key(id: u64, fd: u64) -> u64 {
    id >> 32 << 32 | fd & 0xffff_ffff
}

#[inline(always)]
fn received(call: impl Call) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::HTTP) || matches!(call.result(), EAGAIN | EINTR) {
        return Counter::HttpIgnored;
    }
    let key = key(id, call.arg(0));
    match CONNECTIONS.get_ptr_mut(&key) {
        Some(state) => {
            if call.result() < 0 {
                return failed(call, id);
            }
            // SAFETY: a value of the map.
            if unsafe { state.read_volatile() } == NEW && call.result() > 0 {
                let begin = first_bytes(call);
                if !(b'A'..=b'Z').contains(&(begin as u8)) {
                    return foreign(&key, begin);
                }
                // SAFETY: as above.
                unsafe { state.write_volatile(OPEN) };
            }
        }
        None => {
            if call.result() < REQUEST_MIN || !begins_request(first_bytes(call)) {
                return Counter::HttpIgnored;
            }
            if CONNECTIONS.insert(&key, &OPEN, 0).is_err() {
                return Counter::HttpNotKept;
            }
        }
    }
    captured::<_, HTTP_RECEIVED_HEAD, HTTP_RECEIVED_TAIL>(call, id, HttpOp::Received)
}

#[inline(always)]
fn sent(call: impl Call) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::HTTP) || matches!(call.result(), EAGAIN | EINTR | 0) {
        return Counter::HttpIgnored;
    }
    if let Some(early) = known(call, id) {
        return early;
    }
    captured::<_, HTTP_SENT_HEAD, HTTP_SENT_TAIL>(call, id, HttpOp::Sent)
}

/// What to do at once with a call that would send: nothing of it is content. `None`: go on.
#[inline(always)]
fn known(call: impl Call, id: u64) -> Option<Counter> {
    let key = key(id, call.arg(0));
    let Some(state) = CONNECTIONS.get_ptr_mut(&key) else {
        return Some(Counter::HttpIgnored);
    };
    // SAFETY: a value of the map.
    if unsafe { state.read_volatile() } == NEW {
        // No HTTP server speaks first.
        return Some(foreign(&key, 0));
    }
    if call.result() < 0 {
        return Some(failed(call, id));
    }
    None
}

#[inline(always)]
fn accepted(call: impl Call) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::HTTP) || call.result() < 0 {
        return Counter::HttpIgnored;
    }
    let key = key(id, call.result() as u64);
    if CONNECTIONS.insert(&key, &NEW, 0).is_err() {
        return Counter::HttpNotKept;
    }
    told(id, HttpOp::Accepted, call.result() as u32, 0)
}

#[inline(always)]
fn closed(fd: u64) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::HTTP) {
        return Counter::HttpIgnored;
    }
    let key = key(id, fd);
    if CONNECTIONS.get_ptr_mut(&key).is_none() || CONNECTIONS.remove(&key).is_err() {
        return Counter::HttpIgnored;
    }
    told(id, HttpOp::Closed, fd as u32, 0)
}

/// A connection that is not HTTP: known no more.
#[inline(always)]
fn foreign(key: &u64, begin: u64) -> Counter {
    // Fails where it was closed meanwhile.
    let _ = CONNECTIONS.remove(key);
    told(bpf_get_current_pid_tgid(), HttpOp::Foreign, *key as u32, begin)
}

#[inline(always)]
fn failed(call: impl Call, id: u64) -> Counter {
    told(
        id,
        HttpOp::Failed,
        call.arg(0) as u32,
        call.result().unsigned_abs(),
    )
}

/// The first bytes of what was read, little endian; 0 where they can't be read.
#[inline(always)]
fn first_bytes(call: impl Call) -> u64 {
    let mut bytes = 0_u64;
    let len = opaque((call.result() as u64).min(8)) & 0xf;
    if len > 8 {
        return 0;
    }
    // SAFETY: at most the bytes of the word; the helper checks where they come from.
    unsafe { bpf_probe_read_user((&raw mut bytes).cast(), len as u32, call.arg(1) as *const _) };
    bytes
}

/// Whether bytes are the begin of a request line: a method, a space, and a path.
#[inline(always)]
fn begins_request(bytes: u64) -> bool {
    const fn word(text: &[u8]) -> u64 {
        let mut bytes = [0; 8];
        let mut at = 0;
        while at < text.len() {
            bytes[at] = text[at];
            at += 1;
        }
        u64::from_le_bytes(bytes)
    }
    let five = bytes & 0xff_ffff_ffff;
    let six = bytes & 0xffff_ffff_ffff;
    let seven = bytes & 0xff_ffff_ffff_ffff;
    five == const { word(b"GET /") }
        || six == const { word(b"POST /") }
        || five == const { word(b"PUT /") }
        || six == const { word(b"HEAD /") }
        || seven == const { word(b"PATCH /") }
        || bytes == const { word(b"DELETE /") }
        || bytes == const { word(b"OPTIONS ") }
        // HTTP/2, which is counted as such.
        || bytes == const { word(b"PRI * HT") }
}

/// A record with room for `N` bytes of content.
#[repr(C)]
struct Slot<const N: usize> {
    header: HttpHeader,
    content: [u8; N],
}

/// Fills a header, but for the lengths, which it sets to 0.
///
/// Done with volatile writes, one word after the other: the compiler would gather the values on the stack.
///
/// # Safety
///
/// `to` must be a header inside a reserved record.
#[inline(always)]
unsafe fn write_header(to: *mut HttpHeader, id: u64, op: HttpOp, fd: u32, size: u64) {
    // SAFETY: of the caller.
    unsafe {
        (&raw mut (*to).size).write_volatile(size);
        (&raw mut (*to).fd).write_volatile(fd as i32);
        (&raw mut (*to).kind).write_volatile(Kind::Http as u32);
        (&raw mut (*to).op).write_volatile(op as u32);
        (&raw mut (*to).tgid).write_volatile((id >> 32) as u32);
        (&raw mut (*to).tid).write_volatile(id as u32);
        (&raw mut (*to).head_len).write_volatile(0);
        (&raw mut (*to).tail_len).write_volatile(0);
        (&raw mut (*to).reserved).write_volatile(0);
        (&raw mut (*to).time_ns).write_volatile(now());
    }
}

/// Writes a record without content.
#[inline(always)]
fn told(id: u64, op: HttpOp, fd: u32, size: u64) -> Counter {
    let Some(mut record) = EVENTS.reserve::<HttpHeader>(0) else {
        return Counter::LostHttpRingFull;
    };
    // SAFETY: the record is one header.
    unsafe { write_header(record.as_mut_ptr(), id, op, fd, size) };
    record.submit(wakeup(size_of::<HttpHeader>()));
    Counter::HttpCaptured
}

/// Writes what a buffer held, with the call's second argument its address and the result its size.
#[inline(always)]
fn captured<C: Call, const HEAD: usize, const TAIL: usize>(call: C, id: u64, op: HttpOp) -> Counter {
    const SMALL: usize = HTTP_CLASSES[0];
    const MIDDLE: usize = HTTP_CLASSES[1];
    const LARGE: usize = HTTP_CLASSES[2];
    const { assert!(HEAD + TAIL <= LARGE) };
    let size = call.result() as u64;
    if size == 0 {
        return told(id, op, call.arg(0) as u32, 0);
    }
    if size <= SMALL as u64 {
        captured_in::<C, SMALL, SMALL, 0>(call, id, op)
    } else if size <= MIDDLE as u64 {
        captured_in::<C, MIDDLE, MIDDLE, 0>(call, id, op)
    } else {
        captured_in::<C, LARGE, HEAD, TAIL>(call, id, op)
    }
}

#[inline(always)]
fn captured_in<C: Call, const N: usize, const HEAD: usize, const TAIL: usize>(
    call: C,
    id: u64,
    op: HttpOp,
) -> Counter {
    let Some(mut record) = EVENTS.reserve::<Slot<N>>(0) else {
        return Counter::LostHttpRingFull;
    };
    let slot = record.as_mut_ptr();
    // SAFETY: `slot` is the reserved record.
    let is_read = unsafe {
        let size = call.result() as u64;
        write_header(&raw mut (*slot).header, id, op, call.arg(0) as u32, size);
        read_buffer::<N, HEAD, TAIL>(slot, call.arg(1), size)
    };
    record.submit(wakeup(size_of::<Slot<N>>()));
    if is_read {
        Counter::HttpCaptured
    } else {
        Counter::LostHttpUnreadable
    }
}

/// Reads all of a buffer where it fits in `HEAD` and `TAIL` together, else its head and tail, and sets their
/// lengths. False where it can't be read: they are 0 then.
///
/// # Safety
///
/// `slot` must be a reserved record with its header written, but for the lengths.
#[inline(always)]
unsafe fn read_buffer<const N: usize, const HEAD: usize, const TAIL: usize>(
    slot: *mut Slot<N>,
    from: u64,
    size: u64,
) -> bool {
    // SAFETY: of the caller for the record's fields; what is written behind `to` is checked to be in bounds.
    unsafe {
        let header = &raw mut (*slot).header;
        let to = (&raw mut (*slot).content).cast::<u8>();
        if TAIL > 0 && size > (HEAD + TAIL) as u64 {
            if !read(to, HEAD as u32, from) || !read(to.add(HEAD), TAIL as u32, from + size - TAIL as u64) {
                return false;
            }
            (&raw mut (*header).head_len).write_volatile(HEAD as u32);
            (&raw mut (*header).tail_len).write_volatile(TAIL as u32);
            return true;
        }
        let len = opaque(size);
        if len > (HEAD + TAIL) as u64 || !read(to, len as u32, from) {
            return false;
        }
        (&raw mut (*header).head_len).write_volatile(len as u32);
        true
    }
}

/// Reads `len` bytes of user memory, false when they can't be read.
///
/// # Safety
///
/// `to` must have room for `len` bytes, in a way that the verifier can follow.
#[inline(always)]
unsafe fn read(to: *mut u8, len: u32, from: u64) -> bool {
    // SAFETY: of the caller for `to`; the helper checks `from`.
    unsafe { bpf_probe_read_user(to.cast(), len, from as *const _) == 0 }
}

/// `msg_iov` of `struct msghdr`, of 64-bit Linux.
const MSG_IOV: u64 = 16;

/// The call's second argument is an array of `struct iovec`, or with `is_message` a `struct msghdr` with one.
#[inline(always)]
fn sent_vectors(call: impl Call, is_message: bool) -> Counter {
    const LARGE: usize = HTTP_CLASSES[2];
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::HTTP) || matches!(call.result(), EAGAIN | EINTR | 0) {
        return Counter::HttpIgnored;
    }
    if let Some(early) = known(call, id) {
        return early;
    }
    let Some(mut record) = EVENTS.reserve::<Slot<LARGE>>(0) else {
        return Counter::LostHttpRingFull;
    };
    let slot = record.as_mut_ptr();
    // SAFETY: `slot` is the reserved record.
    let is_read = unsafe {
        write_header(
            &raw mut (*slot).header,
            id,
            HttpOp::Sent,
            call.arg(0) as u32,
            call.result() as u64,
        );
        let vectors = if is_message {
            message_vectors(slot, call.arg(1))
        } else {
            call.arg(1)
        };
        vectors != 0 && read_vectors(slot, vectors)
    };
    record.submit(wakeup(size_of::<Slot<LARGE>>()));
    if is_read {
        Counter::HttpCaptured
    } else {
        Counter::LostHttpUnreadable
    }
}

/// The address of a message's vectors, 0 where it can't be read.
///
/// # Safety
///
/// `slot` must be a reserved record.
#[inline(always)]
unsafe fn message_vectors<const N: usize>(slot: *mut Slot<N>, message: u64) -> u64 {
    // SAFETY: of the caller. The word lies where content will be.
    unsafe {
        let word = (&raw mut (*slot).content).cast::<u64>();
        if read(word.cast(), 8, message + MSG_IOV) {
            word.read_volatile()
        } else {
            0
        }
    }
}

/// Reads what vectors held of the bytes that went out: all where it is in the first vector and no more than the
/// record takes, or in the first two, the second by its begin; else the head of the first.
///
/// # Safety
///
/// `slot` must be a reserved record with its header written, but for the lengths.
#[inline(always)]
unsafe fn read_vectors<const N: usize>(slot: *mut Slot<N>, vectors: u64) -> bool {
    const { assert!(HTTP_SENT_HEAD + HTTP_SENT_TAIL <= N) };
    // SAFETY: of the caller for the record's fields; what is written behind `to` is checked to be in bounds.
    unsafe {
        let header = &raw mut (*slot).header;
        let to = (&raw mut (*slot).content).cast::<u8>();
        // The vector lies for a moment where content will be, so that it needs no room on the stack.
        if !read(to, 16, vectors) {
            return false;
        }
        let base = to.cast::<u64>().read_volatile();
        let first = to.cast::<u64>().add(1).read_volatile();
        let size = (&raw const (*header).size).read_volatile();
        if first >= size {
            return read_buffer::<N, HTTP_SENT_HEAD, HTTP_SENT_TAIL>(slot, base, size);
        }
        let first = opaque(first);
        if first > HTTP_SENT_HEAD as u64 {
            if !read(to, HTTP_SENT_HEAD as u32, base) {
                return false;
            }
            (&raw mut (*header).head_len).write_volatile(HTTP_SENT_HEAD as u32);
            return true;
        }
        // A header, as a rule, with its body in the second vector. That it is there follows from `first < size`.
        let place = (&raw mut (*slot).content).cast::<u8>().add(N - 16);
        if !read(place, 16, vectors + 16) || !read(to, first as u32, base) {
            return false;
        }
        let base = place.cast::<u64>().read_volatile();
        let second = place.cast::<u64>().add(1).read_volatile();
        let len = opaque(second.min(size - first).min(HTTP_SENT_TAIL as u64));
        if len > HTTP_SENT_TAIL as u64 || !read(to.add(first as usize), len as u32, base) {
            return false;
        }
        (&raw mut (*header).head_len).write_volatile((first + len) as u32);
        true
    }
}
