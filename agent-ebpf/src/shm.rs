//! Segments of POSIX shared memory that a process hands to another, or takes.
//!
//! A put is `flock` (waiting), `shm_open` with `O_CREAT`, `ftruncate`, `flock` to unlock; a get is `shm_open`,
//! polled until it works, `flock` (without waiting), `shm_unlink`, `flock` to unlock; each in one thread. So a
//! thread's state is a few words, and a hop gives four records: two for the put, two for the get. A poll gives
//! none: it stores its time over that of the poll before.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_pid_tgid, generated::bpf_probe_read_user_str},
    macros::{map, uprobe},
    maps::LruHashMap,
    programs::{ProbeContext, RetProbeContext},
};
use omnitap_ebpf::{Counter, Kind, SHM_NAME_ROOM, ShmHeader, ShmStep, watch};

use crate::maps::{EVENTS, count, is_watched, now, wakeup};

/// `O_CREAT` of fcntl.h, on both machines.
const O_CREAT: u64 = 0o100;
// Of sys/file.h.
const LOCK_EX: u32 = 2;
const LOCK_NB: u32 = 4;
const LOCK_UN: u32 = 8;

/// An open that is followed by a lock within this time is the open of that get. The last poll of another get,
/// whose result is not seen, may be the one before a get that polls nothing: then it is mostly older.
const OPEN_AGE_NS: u64 = 1_000_000_000;

// Stages of a thread.
/// Holds no lock that matters.
const IDLE: u64 = 0;
/// Holds a lock that it waited for: a put may follow.
const LOCKED: u64 = 1;
/// Holds a lock that it got at once: a get may follow.
const LOCKED_AT_ONCE: u64 = 2;
/// Makes a segment.
const CREATED: u64 = 3;
/// Has given the segment a size.
const SIZED: u64 = 4;
/// Has removed the segment that it copied.
const TAKEN: u64 = 5;

/// What a thread is doing.
#[repr(C)]
struct Thread {
    stage: u64,
    /// The last open without `O_CREAT`; 0: none that could begin a get.
    open_ns: u64,
    start_ns: u64,
    size: u64,
}

/// Threads that ever opened a segment or locked a file, by process and thread. Those of the past are evicted.
/// A CPU sets aside up to 128 entries when a thread first comes on it: so the number is far above that of
/// threads.
#[map]
static THREADS: LruHashMap<u64, Thread> = LruHashMap::with_max_entries(8192, 0);

/// What a thread is remembered as at first. On the stack it would take the room of all that has to lie there.
static NEW: Thread = Thread {
    stage: IDLE,
    open_ns: 0,
    start_ns: 0,
    size: 0,
};

/// A record with room for the name.
#[repr(C)]
struct Named {
    header: ShmHeader,
    name: [u8; SHM_NAME_ROOM],
}

/// Entry of `int shm_open(const char *name, int oflag, mode_t mode)`.
#[uprobe]
fn shm_open(ctx: ProbeContext) {
    count(opened(&ctx));
}

/// Entry of `int shm_unlink(const char *name)`.
#[uprobe]
fn shm_unlink(ctx: ProbeContext) {
    count(unlinked(&ctx));
}

/// Behind the system call of `int ftruncate(int fd, off_t length)`.
#[uprobe]
fn ftruncate(ctx: ProbeContext) {
    count(truncated(&ctx));
}

/// Behind the system call of `int flock(int fd, int operation)`.
#[uprobe]
fn flock(ctx: ProbeContext) {
    count(locked(&ctx));
}

/// Process and thread, where the process is watched.
#[inline(always)]
fn watched() -> Option<u64> {
    let id = bpf_get_current_pid_tgid();
    is_watched((id >> 32) as u32, watch::SHM).then_some(id)
}

#[inline(always)]
fn arg(ctx: &ProbeContext, n: usize) -> u64 {
    ctx.arg(n).unwrap_or(0)
}

/// Whether the system call that was just made gave 0: it leaves its result in the register that a function
/// does.
#[inline(always)]
fn succeeded(ctx: &ProbeContext) -> bool {
    RetProbeContext::new(ctx.as_ptr()).ret::<u64>() == 0
}

#[inline(always)]
fn opened(ctx: &ProbeContext) -> Counter {
    let Some(id) = watched() else {
        return Counter::ShmIgnored;
    };
    if arg(ctx, 1) & O_CREAT == 0 {
        let Some(thread) = remembered(&id) else {
            return Counter::ShmNotKept;
        };
        // SAFETY: a value of the map, which only its thread writes.
        unsafe { (&raw mut (*thread).open_ns).write(now()) };
        return Counter::ShmNoted;
    }
    let Some(thread) = THREADS.get_ptr_mut(&id) else {
        return Counter::ShmIgnored;
    };
    // SAFETY: as above.
    unsafe {
        if (&raw const (*thread).stage).read() == IDLE {
            return Counter::ShmIgnored;
        }
        (&raw mut (*thread).stage).write(CREATED);
    }
    write_named(ctx, id, ShmStep::Create, thread)
}

#[inline(always)]
fn unlinked(ctx: &ProbeContext) -> Counter {
    let Some(id) = watched() else {
        return Counter::ShmIgnored;
    };
    if let Some(thread) = THREADS.get_ptr_mut(&id) {
        // SAFETY: a value of the map, which only its thread writes.
        unsafe {
            // Whatever it opened is gone.
            (&raw mut (*thread).open_ns).write(0);
            if (&raw const (*thread).stage).read() == LOCKED_AT_ONCE {
                (&raw mut (*thread).stage).write(TAKEN);
                return write_named(ctx, id, ShmStep::Take, thread);
            }
        }
    }
    write_named(ctx, id, ShmStep::Unlink, core::ptr::null())
}

#[inline(always)]
fn truncated(ctx: &ProbeContext) -> Counter {
    let Some(id) = watched() else {
        return Counter::ShmIgnored;
    };
    if !succeeded(ctx) {
        return Counter::ShmIgnored;
    }
    let Some(thread) = THREADS.get_ptr_mut(&id) else {
        return Counter::ShmIgnored;
    };
    // SAFETY: a value of the map, which only its thread writes.
    unsafe {
        if (&raw const (*thread).stage).read() == CREATED {
            (&raw mut (*thread).stage).write(SIZED);
            (&raw mut (*thread).size).write(arg(ctx, 1));
            return Counter::ShmNoted;
        }
    }
    Counter::ShmIgnored
}

#[inline(always)]
fn locked(ctx: &ProbeContext) -> Counter {
    let Some(id) = watched() else {
        return Counter::ShmIgnored;
    };
    if !succeeded(ctx) {
        return Counter::ShmIgnored;
    }
    let operation = arg(ctx, 1) as u32;
    if operation & LOCK_EX != 0 {
        let Some(thread) = remembered(&id) else {
            return Counter::ShmNotKept;
        };
        // SAFETY: a value of the map, which only its thread writes.
        unsafe { begin(thread, operation & LOCK_NB != 0) };
        return Counter::ShmNoted;
    }
    if operation & LOCK_UN != 0
        && let Some(thread) = THREADS.get_ptr_mut(&id)
    {
        return unlocked(id, thread);
    }
    Counter::ShmIgnored
}

/// A thread got a lock.
///
/// # Safety
///
/// `thread` must be a value of the map, of this thread.
#[inline(always)]
unsafe fn begin(thread: *mut Thread, at_once: bool) {
    let mut start_ns = now();
    // SAFETY: of the caller.
    unsafe {
        let open_ns = (&raw const (*thread).open_ns).read();
        if at_once && start_ns.wrapping_sub(open_ns) < OPEN_AGE_NS {
            start_ns = open_ns;
        }
        (&raw mut (*thread).start_ns).write(start_ns);
        (&raw mut (*thread).stage).write(if at_once { LOCKED_AT_ONCE } else { LOCKED });
    }
}

#[inline(always)]
fn unlocked(id: u64, thread: *mut Thread) -> Counter {
    // SAFETY: a value of the map, which only its thread writes.
    let stage = unsafe {
        let stage = (&raw const (*thread).stage).read();
        (&raw mut (*thread).stage).write(IDLE);
        // The open of a segment under the lock begins no get.
        (&raw mut (*thread).open_ns).write(0);
        stage
    };
    if stage != SIZED && stage != TAKEN {
        return Counter::ShmIgnored;
    }
    let Some(mut record) = EVENTS.reserve::<ShmHeader>(0) else {
        return Counter::LostShmRingFull;
    };
    let header = record.as_mut_ptr();
    // SAFETY: the reserved record, and a value of the map.
    unsafe {
        write_header(header, id, ShmStep::Done, core::ptr::null());
        if stage == SIZED {
            let size = (&raw const (*thread).size).read();
            (&raw mut (*header).size).write_volatile(size);
        }
    }
    record.submit(wakeup(size_of::<ShmHeader>()));
    Counter::ShmCaptured
}

/// What is known of a thread, from now on if nothing is.
#[inline(always)]
fn remembered(id: &u64) -> Option<*mut Thread> {
    if let Some(thread) = THREADS.get_ptr_mut(id) {
        return Some(thread);
    }
    // Once a thread: a lookup costs far less.
    THREADS.insert(id, &NEW, 0).ok()?;
    THREADS.get_ptr_mut(id)
}

/// Fills a header: with the thread's start where there is a thread, and without size and name.
///
/// Done with volatile writes, one word after the other: the compiler would gather the values on the stack.
///
/// # Safety
///
/// `to` must be a header inside a reserved record, `thread` null or a value of the map.
#[inline(always)]
unsafe fn write_header(to: *mut ShmHeader, id: u64, step: ShmStep, thread: *const Thread) {
    // SAFETY: of the caller.
    unsafe {
        let start_ns = if thread.is_null() {
            0
        } else {
            (&raw const (*thread).start_ns).read()
        };
        (&raw mut (*to).start_ns).write_volatile(start_ns);
        (&raw mut (*to).kind).write_volatile(Kind::Shm as u32);
        (&raw mut (*to).step).write_volatile(step as u32);
        (&raw mut (*to).tgid).write_volatile((id >> 32) as u32);
        (&raw mut (*to).tid).write_volatile(id as u32);
        (&raw mut (*to).size).write_volatile(0);
        (&raw mut (*to).name_len).write_volatile(0);
        (&raw mut (*to).reserved).write_volatile(0);
        (&raw mut (*to).time_ns).write_volatile(now());
    }
}

/// Writes a step with the name that is the call's first argument.
#[inline(always)]
fn write_named(ctx: &ProbeContext, id: u64, step: ShmStep, thread: *const Thread) -> Counter {
    let Some(mut record) = EVENTS.reserve::<Named>(0) else {
        return Counter::LostShmRingFull;
    };
    let slot = record.as_mut_ptr();
    // SAFETY: `slot` is the reserved record, and has room for the name; the helper checks where it comes from.
    let read = unsafe {
        write_header(&raw mut (*slot).header, id, step, thread);
        let to = (&raw mut (*slot).name).cast();
        bpf_probe_read_user_str(to, SHM_NAME_ROOM as u32, arg(ctx, 0) as *const _)
    };
    // With its NUL: at least 1.
    if read < 1 {
        record.discard(wakeup(0));
        return Counter::LostShmUnreadable;
    }
    // SAFETY: as above.
    unsafe { (&raw mut (*slot).header.name_len).write_volatile(read as u32 - 1) };
    record.submit(wakeup(size_of::<Named>()));
    Counter::ShmCaptured
}
