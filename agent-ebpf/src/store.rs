//! Objects that a process puts into Mooncake's store, or takes from it.
//!
//! The two functions are probed at their entry and at each of their returns, where the result is in its register. So a
//! call is two hits, and one record. In between the call is remembered by its thread: neither calls the other.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_pid_tgid, bpf_probe_read_user, generated},
    macros::{map, uprobe},
    maps::LruHashMap,
    programs::{ProbeContext, RetProbeContext},
};
use omnitap_ebpf::{Counter, Kind, STORE_NAME_ROOM, ShmHeader, ShmStep, watch};

use crate::maps::{EVENTS, count, is_watched, now, wakeup};

/// Whether the object is for aarch64, where a function's result that is an object goes where the ninth register says.
const IS_AARCH64: bool = match option_env!("AYA_BPF_TARGET_ARCH") {
    Some(machine) => matches!(machine.as_bytes(), b"aarch64"),
    None => false,
};

/// A call under way.
#[repr(C)]
struct Call {
    start_ns: u64,
    /// Address of the key's first character, and its length.
    key: u64,
    key_len: u64,
    /// Bytes that are put; for a get the address of its result.
    size: u64,
    /// A [`ShmStep`]; 0: it is over.
    step: u64,
}

/// Threads that ever called the store. Those of the past are evicted.
#[map]
static STORE_CALLS: LruHashMap<u64, Call> = LruHashMap::with_max_entries(4096, 0);

/// What a thread is remembered as at first.
static NEW: Call = Call {
    start_ns: 0,
    key: 0,
    key_len: 0,
    size: 0,
    step: 0,
};

/// A record with room for the key.
#[repr(C)]
struct Named {
    header: ShmHeader,
    name: [u8; STORE_NAME_ROOM],
}

/// Entry of `int RealClient::put(const std::string &key, std::span<const char> value, const ReplicateConfig &)`.
#[uprobe]
fn store_put(ctx: ProbeContext) {
    let (key, size) = (arg(&ctx, 1), arg(&ctx, 3));
    count(called(ShmStep::StorePut, key, size));
}

/// Entry of `std::shared_ptr<BufferHandle> RealClient::get_buffer(const std::string &key)`. The result is written where
/// the caller says: on x86-64 that is the first argument, on aarch64 it is none of them.
#[uprobe]
fn store_get(ctx: ProbeContext) {
    let (key, result) = if IS_AARCH64 {
        // SAFETY: the registers at the probe, of which aarch64 has 31.
        let x8 = unsafe { ctx.as_ptr().cast::<u64>().add(8).read() };
        (arg(&ctx, 1), x8)
    } else {
        (arg(&ctx, 2), arg(&ctx, 0))
    };
    count(called(ShmStep::StoreGet, key, result));
}

/// A return of either.
#[uprobe]
fn store_return(ctx: ProbeContext) {
    count(returned(&ctx));
}

#[inline(always)]
fn arg(ctx: &ProbeContext, n: usize) -> u64 {
    ctx.arg(n).unwrap_or(0)
}

/// A call begins. `key` is the address of a string; `size` as in [`Call`].
#[inline(always)]
fn called(step: ShmStep, key: u64, size: u64) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::SHM) {
        return Counter::ShmIgnored;
    }
    let call = match STORE_CALLS.get_ptr_mut(&id) {
        Some(call) => call,
        None => {
            if STORE_CALLS.insert(&id, &NEW, 0).is_err() {
                return Counter::ShmNotKept;
            }
            match STORE_CALLS.get_ptr_mut(&id) {
                Some(call) => call,
                None => return Counter::ShmNotKept,
            }
        }
    };
    // SAFETY: a value of the map, which only its thread writes; the helper checks where it reads. A string of the C++
    // library starts with the address and the length of its characters.
    unsafe {
        // A call that left by another way, an exception or a jump to another function, was never seen to return.
        let is_open = (&raw const (*call).step).read() != 0;
        let (Ok(address), Ok(len)) = (
            bpf_probe_read_user(key as *const u64),
            bpf_probe_read_user((key + 8) as *const u64),
        ) else {
            (&raw mut (*call).step).write(0);
            return Counter::LostShmUnreadable;
        };
        (&raw mut (*call).key).write(address);
        (&raw mut (*call).key_len).write(len);
        (&raw mut (*call).size).write(size);
        (&raw mut (*call).step).write(step as u64);
        (&raw mut (*call).start_ns).write(now());
        if is_open {
            Counter::StoreUnreturned
        } else {
            Counter::ShmNoted
        }
    }
}

#[inline(always)]
fn returned(ctx: &ProbeContext) -> Counter {
    let id = bpf_get_current_pid_tgid();
    if !is_watched((id >> 32) as u32, watch::SHM) {
        return Counter::ShmIgnored;
    }
    let Some(call) = STORE_CALLS.get_ptr_mut(&id) else {
        return Counter::ShmIgnored;
    };
    // SAFETY: a value of the map, which only its thread writes; the helpers check where they read.
    unsafe {
        let step = (&raw const (*call).step).read();
        (&raw mut (*call).step).write(0);
        let is_get = step == ShmStep::StoreGet as u64;
        let succeeded = if is_get {
            // An object was found where the pointer that is the result is not null.
            bpf_probe_read_user((*call).size as *const u64).is_ok_and(|pointer| pointer != 0)
        } else {
            let result = RetProbeContext::new(ctx.as_ptr()).ret::<u64>();
            step == ShmStep::StorePut as u64 && result as u32 == 0
        };
        let len = (&raw const (*call).key_len).read();
        if !succeeded || len == 0 || len > STORE_NAME_ROOM as u64 {
            return Counter::ShmIgnored;
        }
        let Some(mut record) = EVENTS.reserve::<Named>(0) else {
            return Counter::LostShmRingFull;
        };
        let slot = record.as_mut_ptr();
        let header = &raw mut (*slot).header;
        // One word after the other: the compiler would gather the values on the stack.
        (&raw mut (*header).start_ns).write_volatile((&raw const (*call).start_ns).read());
        (&raw mut (*header).kind).write_volatile(Kind::Shm as u32);
        (&raw mut (*header).step).write_volatile(step as u32);
        (&raw mut (*header).tgid).write_volatile((id >> 32) as u32);
        (&raw mut (*header).tid).write_volatile(id as u32);
        let size = if is_get {
            0
        } else {
            (&raw const (*call).size).read()
        };
        (&raw mut (*header).size).write_volatile(size);
        (&raw mut (*header).reserved).write_volatile(0);
        (&raw mut (*header).name_len).write_volatile(len as u32);
        (&raw mut (*header).time_ns).write_volatile(now());
        let to = (&raw mut (*slot).name).cast();
        let read =
            generated::bpf_probe_read_user(to, len as u32, (&raw const (*call).key).read() as *const _);
        if read != 0 {
            record.discard(wakeup(0));
            return Counter::LostShmUnreadable;
        }
        record.submit(wakeup(size_of::<Named>()));
    }
    Counter::ShmCaptured
}
