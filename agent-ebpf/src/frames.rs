//! Frames that a process hands to `zmq_msg_send`.

use core::{cell::UnsafeCell, mem::MaybeUninit};

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_pid_tgid, generated::bpf_probe_read_user},
    macros::{map, uprobe},
    maps::LruHashMap,
    programs::ProbeContext,
};
use omnitap_ebpf::{
    CAPTURE_LIMIT_MIN, Counter, FrameHeader, Kind, MESSAGE_TIMEOUT_NS, PREFIX_MAX, SIZE_CLASSES, TAIL_MAX,
    flag, watch,
};

use crate::maps::{EVENTS, add, capture_limit, count, is_watched, now, wakeup};

/// `ZMQ_SNDMORE` of zmq.h.
const ZMQ_SNDMORE: u64 = 2;

// The 64 bytes of `zmq_msg_t`, as in src/msg.hpp of libzmq 4.2 to 4.3.5: the metadata pointer, then by type
// the bytes themselves (`vsm`), a pointer to `content_t` (`lmsg`, `zclmsg`), or pointer and size (`cmsg`);
// then, for each type, the size of a `vsm` at 41, the type at 42.
const TYPE_VSM: u8 = 101;
const TYPE_LMSG: u8 = 102;
const TYPE_CMSG: u8 = 104;
const TYPE_ZCLMSG: u8 = 105;
const MSG_CONTENT: u64 = 8;
const VSM_MAX: u64 = 33;

/// The time of the payload, in nanoseconds, of multipart messages whose last part has not come yet.
///
/// The key is the socket, not the thread: libzmq puts parts together by socket, so neither a thread that
/// serves two sockets nor a socket that changes its thread mixes messages. An entry lives for microseconds;
/// what a dead process leaves is evicted.
#[map]
static MESSAGES: LruHashMap<[u64; 2], u64> = LruHashMap::with_max_entries(1024, 0);

/// Entries in `MESSAGES`, as a plain word: that it is 0 saves the lookup, nearly always. An entry that was
/// evicted, of a process that died in the midst of a message, leaves it too high, which costs lookups but
/// never a frame.
static OPEN_MESSAGES: Word = Word(UnsafeCell::new(0));

struct Word(UnsafeCell<u64>);

// SAFETY: it is read by one load, and written by atomic instructions alone.
unsafe impl Sync for Word {}

#[inline(always)]
fn open_messages() -> u64 {
    // SAFETY: as for `Sync`.
    unsafe { OPEN_MESSAGES.0.get().read_volatile() }
}

#[inline(always)]
fn add_open_messages(number: u64) {
    // SAFETY: a word of the object's data.
    unsafe { add(OPEN_MESSAGES.0.get(), number) };
}

/// Entry of `int zmq_msg_send(zmq_msg_t *msg, void *socket, int flags)`.
#[uprobe]
fn zmq_msg_send(ctx: ProbeContext) {
    let counter = frame(&ctx);
    count(counter);
}

/// An argument of the probed call. Loaded anew at each use: the compiler would keep it on the stack, of which
/// there is little.
#[inline(always)]
fn arg(ctx: &ProbeContext, n: usize) -> u64 {
    let mut regs = ctx.as_ptr();
    // SAFETY: no instruction is emitted. The compiler can no longer tell that two loads are of one place.
    unsafe { core::arch::asm!("/* {0} */", inout(reg) regs, options(nomem, nostack, preserves_flags)) };
    ProbeContext::new(regs).arg(n).unwrap_or(0)
}

#[inline(always)]
fn msg(ctx: &ProbeContext) -> u64 {
    arg(ctx, 0)
}

#[inline(always)]
fn socket(ctx: &ProbeContext) -> u64 {
    arg(ctx, 1)
}

#[inline(always)]
fn has_more(ctx: &ProbeContext) -> bool {
    arg(ctx, 2) & ZMQ_SNDMORE != 0
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

/// Hides a value's origin from the compiler, so that it keeps a comparison that only the verifier needs, and
/// works a value out again where it would spend a register on it.
#[inline(always)]
fn opaque(mut value: u64) -> u64 {
    // SAFETY: no instruction is emitted.
    unsafe { core::arch::asm!("/* {0} */", inout(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// The one buffer on the stack: five words, in turn for all that has to lie there.
///
/// The compiler would keep what is found beside it. With 48 bytes in all there is no room, so that lives in the
/// buffer too, and is loaded anew at each use. With one word more the buffer would lie across two cache lines
/// (x86_64, measured on 6.18), and the read of the message would cost 40 ns more.
struct Buffer(MaybeUninit<[u64; 5]>);

impl Buffer {
    const BYTES: u32 = 40;
    const CONTENT: usize = 2;
    const SIZE: usize = 3;
    /// Of the message as it was read: the last byte of a `vsm`, then its size, then the type.
    const ABOUT: usize = 4;
    /// Process and thread, as `bpf_get_current_pid_tgid` gives them. A load is cheaper than another call.
    const ID: usize = 4;

    #[inline(always)]
    fn start(&mut self) -> *mut u64 {
        self.0.as_mut_ptr().cast()
    }

    /// A word that was written before.
    #[inline(always)]
    fn get(&self, word: usize) -> u64 {
        // SAFETY: inside the buffer for the numbers used here; the verifier refuses a word never written.
        unsafe { self.0.as_ptr().cast::<u64>().add(word).read_volatile() }
    }

    #[inline(always)]
    fn set(&mut self, word: usize, value: u64) {
        // SAFETY: inside the buffer for the numbers used here.
        unsafe { self.start().add(word).write_volatile(value) };
    }

    /// Process and thread, and the content's address and size.
    #[inline(always)]
    fn found(&self) -> (u64, u64, u64) {
        (self.get(Self::ID), self.get(Self::CONTENT), self.get(Self::SIZE))
    }

    /// Makes the key of `MESSAGES` in the first two words.
    #[inline(always)]
    fn message_key(&mut self, ctx: &ProbeContext) -> &[u64; 2] {
        self.set(0, socket(ctx));
        self.set(1, self.get(Self::ID) >> 32);
        // SAFETY: just written.
        unsafe { &*self.0.as_ptr().cast() }
    }
}

/// The word at [`Buffer::ABOUT`] as it was read. One register holds it, since what it says is worked out anew at
/// each use.
#[derive(Clone, Copy)]
struct About(u64);

impl About {
    #[inline(always)]
    fn kind(self) -> u8 {
        (opaque(self.0) >> 16) as u8
    }

    #[inline(always)]
    fn vsm_size(self) -> u64 {
        opaque(self.0) >> 8 & 0xff
    }
}

#[inline(always)]
fn frame(ctx: &ProbeContext) -> Counter {
    let mut buffer = Buffer(MaybeUninit::uninit());

    // All that matters of the message in one read: each read has its price, whatever its length. The process
    // is looked up behind it, as nine of ten calls are wake-ups of one byte, which need no look.
    // SAFETY: fills the buffer.
    if !unsafe { read(buffer.start().cast(), Buffer::BYTES, msg(ctx) + MSG_CONTENT) } {
        return if is_watched((bpf_get_current_pid_tgid() >> 32) as u32, watch::FRAMES) {
            Counter::LostUnreadable
        } else {
            Counter::Unwatched
        };
    }
    // Its place in the buffer is free from here on.
    let about = About(buffer.get(Buffer::ABOUT));
    if about.kind() == TYPE_VSM && about.vsm_size() <= 1 && !has_more(ctx) && open_messages() == 0 {
        return Counter::Short;
    }
    buffer.set(Buffer::ID, bpf_get_current_pid_tgid());
    if !is_watched((buffer.get(Buffer::ID) >> 32) as u32, watch::FRAMES) {
        return Counter::Unwatched;
    }
    if about.kind() == TYPE_VSM {
        if about.vsm_size() > VSM_MAX {
            return Counter::LostUnknownType;
        }
        if !has_more(ctx) && open_messages() == 0 {
            return captured_vsm(ctx, &buffer, about);
        }
        buffer.set(Buffer::CONTENT, msg(ctx) + MSG_CONTENT);
        buffer.set(Buffer::SIZE, about.vsm_size());
    } else if matches!(about.kind(), TYPE_LMSG | TYPE_ZCLMSG) {
        // `content_t` starts with the address and the size.
        // SAFETY: fills the words CONTENT and SIZE.
        if !unsafe { read(buffer.start().add(Buffer::CONTENT).cast(), 16, buffer.get(0)) } {
            return Counter::LostUnreadable;
        }
    } else if about.kind() == TYPE_CMSG {
        buffer.set(Buffer::CONTENT, buffer.get(0));
        buffer.set(Buffer::SIZE, buffer.get(1));
    } else {
        return Counter::LostUnknownType;
    }

    let is_aux = open_messages() != 0 && is_behind_payload(ctx, &mut buffer);
    if has_more(ctx) {
        if !is_aux && buffer.get(Buffer::SIZE) > PREFIX_MAX {
            remember(ctx, &mut buffer);
        }
    } else if buffer.get(Buffer::SIZE) <= 1 {
        return Counter::Short;
    }
    if is_aux {
        return header_only(ctx, &buffer);
    }
    capture(ctx, &buffer)
}

/// Whether this part comes behind its message's payload. Forgets the message at its last part.
#[inline(always)]
fn is_behind_payload(ctx: &ProbeContext, buffer: &mut Buffer) -> bool {
    let key = buffer.message_key(ctx);
    let Some(last) = MESSAGES.get_ptr_mut(key) else {
        return false;
    };
    // SAFETY: a value of the map; should the entry be reused meanwhile, then by a message as young.
    let is_open = now().wrapping_sub(unsafe { last.read_volatile() }) < MESSAGE_TIMEOUT_NS;
    if is_open && has_more(ctx) {
        // SAFETY: as above.
        unsafe { last.write_volatile(now()) };
    } else if MESSAGES.remove(key).is_ok() {
        add_open_messages(u64::MAX);
    }
    is_open
}

/// Remembers that a message's payload has come and further parts will.
#[inline(always)]
fn remember(ctx: &ProbeContext, buffer: &mut Buffer) {
    buffer.message_key(ctx);
    // The key has the process: its word can hold the time for a moment.
    buffer.set(Buffer::ID, now());
    // SAFETY: inside the buffer, and just written.
    let time = unsafe { &*buffer.start().add(Buffer::ID) };
    // SAFETY: as above.
    let key = unsafe { &*buffer.start().cast::<[u64; 2]>() };
    // A message that its sender gave up keeps its entry, and stays counted once.
    let is_new = MESSAGES.get_ptr(key).is_none();
    if MESSAGES.insert(key, time, 0).is_err() {
        count(Counter::MessageNotKept);
    } else if is_new {
        add_open_messages(1);
    }
    buffer.set(Buffer::ID, bpf_get_current_pid_tgid());
}

/// A frame record with room for `N` bytes of content.
#[repr(C)]
struct Slot<const N: usize> {
    header: FrameHeader,
    content: [u8; N],
}

/// Fills all of a header but the lengths, which it sets to 0.
///
/// Done as soon as there is a record, and with volatile writes, so that the values leave the registers here
/// and can be taken back from the record: the compiler would keep them on the stack.
///
/// # Safety
///
/// `to` must be a header inside a reserved record.
#[inline(always)]
unsafe fn write_header(
    to: *mut FrameHeader,
    ctx: &ProbeContext,
    flags: u32,
    id: u64,
    content: u64,
    size: u64,
) {
    // SAFETY: of the caller.
    unsafe {
        (&raw mut (*to).content).write_volatile(content);
        (&raw mut (*to).size).write_volatile(size);
        (&raw mut (*to).socket).write_volatile(socket(ctx));
        (&raw mut (*to).flags).write_volatile(if has_more(ctx) { flags | flag::MORE } else { flags });
        (&raw mut (*to).kind).write_volatile(Kind::Frame as u32);
        (&raw mut (*to).head_len).write_volatile(0);
        (&raw mut (*to).tail_len).write_volatile(0);
        (&raw mut (*to).tgid).write_volatile((id >> 32) as u32);
        (&raw mut (*to).tid).write_volatile(id as u32);
        (&raw mut (*to).time_ns).write_volatile(now());
    }
}

#[inline(always)]
fn header_only(ctx: &ProbeContext, buffer: &Buffer) -> Counter {
    let Some(mut record) = EVENTS.reserve::<FrameHeader>(0) else {
        return Counter::LostRingFull;
    };
    // SAFETY: the record is one header.
    unsafe {
        let (id, content, size) = buffer.found();
        write_header(record.as_mut_ptr(), ctx, flag::AUX, id, content, size);
    }
    record.submit(wakeup(size_of::<FrameHeader>()));
    Counter::Aux
}

#[inline(always)]
fn capture(ctx: &ProbeContext, buffer: &Buffer) -> Counter {
    const CLASSES: [usize; 6] = {
        let [a, b, c, d, e, f] = SIZE_CLASSES;
        [
            a as usize, b as usize, c as usize, d as usize, e as usize, f as usize,
        ]
    };
    let mut len = buffer.get(Buffer::SIZE);
    if len > u64::from(CAPTURE_LIMIT_MIN) {
        len = len.min(capture_limit());
    }
    if len <= CLASSES[0] as u64 {
        captured::<{ CLASSES[0] }>(ctx, buffer, len)
    } else if len <= CLASSES[1] as u64 {
        captured::<{ CLASSES[1] }>(ctx, buffer, len)
    } else if len <= CLASSES[2] as u64 {
        captured::<{ CLASSES[2] }>(ctx, buffer, len)
    } else if len <= CLASSES[3] as u64 {
        captured::<{ CLASSES[3] }>(ctx, buffer, len)
    } else if len <= CLASSES[4] as u64 {
        captured::<{ CLASSES[4] }>(ctx, buffer, len)
    } else {
        captured::<{ CLASSES[5] }>(ctx, buffer, len)
    }
}

/// Captures a `vsm`: its content lies in the message, so it has been read already.
#[inline(always)]
fn captured_vsm(ctx: &ProbeContext, buffer: &Buffer, about: About) -> Counter {
    const ROOM: usize = SIZE_CLASSES[0] as usize;
    const _: () = assert!(ROOM >= Buffer::BYTES as usize);
    let Some(mut record) = EVENTS.reserve::<Slot<ROOM>>(0) else {
        return Counter::LostRingFull;
    };
    let slot = record.as_mut_ptr();
    // SAFETY: `slot` is the reserved record, and has room for the buffer.
    unsafe {
        let header = &raw mut (*slot).header;
        write_header(
            header,
            ctx,
            0,
            buffer.get(Buffer::ID),
            msg(ctx) + MSG_CONTENT,
            about.vsm_size(),
        );
        (&raw mut (*header).head_len).write_volatile(about.vsm_size() as u32);
        let to = (&raw mut (*slot).content).cast::<u64>();
        to.write_volatile(buffer.get(0));
        to.add(1).write_volatile(buffer.get(1));
        to.add(2).write_volatile(buffer.get(2));
        to.add(3).write_volatile(buffer.get(3));
        to.add(4).write_volatile(about.0 & 0xff);
    }
    record.submit(wakeup(size_of::<Slot<ROOM>>()));
    Counter::Captured
}

/// Captures `len` bytes of the content, `len` at most `N`.
#[inline(always)]
fn captured<const N: usize>(ctx: &ProbeContext, buffer: &Buffer, len: u64) -> Counter {
    let Some(mut record) = EVENTS.reserve::<Slot<N>>(0) else {
        return Counter::LostRingFull;
    };
    let slot = record.as_mut_ptr();
    // SAFETY: `slot` is the reserved record.
    let header = unsafe { &raw mut (*slot).header };
    // SAFETY: as above.
    unsafe {
        let (id, content, size) = buffer.found();
        write_header(header, ctx, 0, id, content, size);
    }

    // SAFETY: as above.
    let is_read = unsafe { read_content(slot, len) };
    if !is_read {
        // SAFETY: as above.
        unsafe {
            (&raw mut (*header).flags).write((&raw mut (*header).flags).read() | flag::UNREADABLE);
            (&raw mut (*header).head_len).write(0);
            (&raw mut (*header).tail_len).write(0);
        }
    }
    record.submit(wakeup(size_of::<Slot<N>>()));
    if is_read {
        Counter::Captured
    } else {
        Counter::LostUnreadable
    }
}

/// Reads `len` bytes of the content, head and tail, and sets their lengths.
///
/// # Safety
///
/// `slot` must be a reserved record with its header written, but for the lengths.
#[inline(always)]
unsafe fn read_content<const N: usize>(slot: *mut Slot<N>, len: u64) -> bool {
    let tail_max = (N as u64 / 4).min(TAIL_MAX as u64);
    // SAFETY: of the caller for the record's fields; what is written behind `to` is checked to be in bounds.
    unsafe {
        let header = &raw mut (*slot).header;
        let to = (&raw mut (*slot).content).cast::<u8>();
        let mut head_len = len;
        let size = (&raw const (*header).size).read_volatile();
        if len < size {
            // The comparisons hold since N / 4 < len <= N. They are for the verifier.
            let tail_len = opaque((len / 4).min(TAIL_MAX as u64));
            head_len = opaque(len - tail_len);
            if tail_len > tail_max || head_len > N as u64 - tail_max {
                return false;
            }
            (&raw mut (*header).tail_len).write_volatile(tail_len as u32);
            let content = (&raw const (*header).content).read_volatile();
            if !read(
                to.add(head_len as usize),
                tail_len as u32,
                content + (size - tail_len),
            ) {
                return false;
            }
        }
        head_len = opaque(head_len);
        if head_len > N as u64 {
            return false;
        }
        (&raw mut (*header).head_len).write_volatile(head_len as u32);
        let content = (&raw const (*header).content).read_volatile();
        read(to, head_len as u32, content)
    }
}
