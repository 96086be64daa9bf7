//! Objects that a process puts into Mooncake's store or Yuanrong's data system, or takes from there.
//!
//! The functions are probed at their entry and at each of their returns, where the result is known. So a call is two
//! hits, and one record. In between the call is remembered by its thread: none of them calls another.

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
    /// Bytes that are put.
    size: u64,
    /// Address of the result, where that is an object.
    result: u64,
    /// A [`ShmStep`]; 0: it is over.
    step: u64,
}

/// How a result tells that a call worked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Success {
    /// A number that is 0.
    Zero,
    /// An object that begins with a pointer, which is not null: what was found.
    Found,
    /// An object that begins with a pointer, which is null: to what went wrong.
    NoError,
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
    result: 0,
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
    count(called(ShmStep::StorePut, key, size, 0));
}

/// Entry of `std::shared_ptr<BufferHandle> RealClient::get_buffer(const std::string &key)`.
#[uprobe]
fn store_get(ctx: ProbeContext) {
    count(called(ShmStep::StoreGet, behind_object(&ctx, 1), 0, object(&ctx)));
}

/// A return of either.
#[uprobe]
fn store_return(ctx: ProbeContext) {
    count(returned(&ctx, Success::Zero, Success::Found));
}

/// Entry of `Status ObjectClientImpl::Set(const std::string &key, const StringView &value, const SetParam &)`.
#[uprobe]
fn yuanrong_set(ctx: ProbeContext) {
    // A view is the address and the number of its characters.
    let Some(size) = word(behind_object(&ctx, 2) + 8) else {
        count(Counter::LostShmUnreadable);
        return;
    };
    count(called(
        ShmStep::StorePut,
        behind_object(&ctx, 1),
        size,
        object(&ctx),
    ));
}

/// Entry of `Status ObjectClientImpl::Get(const std::vector<std::string> &keys, int64_t timeout,
/// std::vector<Optional<Buffer>> &, bool, bool)`. vLLM-Omni asks for one key at a time.
#[uprobe]
fn yuanrong_get(ctx: ProbeContext) {
    // A vector starts with the address of its first element.
    let Some(key) = word(behind_object(&ctx, 1)) else {
        count(Counter::LostShmUnreadable);
        return;
    };
    count(called(ShmStep::StoreGet, key, 0, object(&ctx)));
}

/// A return of either.
#[uprobe]
fn yuanrong_return(ctx: ProbeContext) {
    count(returned(&ctx, Success::NoError, Success::NoError));
}

/// Where a function whose result is an object writes it: the caller says that, on x86-64 in the first argument's place,
/// on aarch64 in none of theirs.
#[inline(always)]
fn object(ctx: &ProbeContext) -> u64 {
    if IS_AARCH64 {
        // SAFETY: the registers at the probe, of which aarch64 has 31.
        unsafe { ctx.as_ptr().cast::<u64>().add(8).read() }
    } else {
        arg(ctx, 0)
    }
}

/// The argument of such a function, from 0, the object whose function it is.
#[inline(always)]
fn behind_object(ctx: &ProbeContext, n: usize) -> u64 {
    arg(ctx, if IS_AARCH64 { n } else { n + 1 })
}

/// A word of the process's memory.
#[inline(always)]
fn word(address: u64) -> Option<u64> {
    // SAFETY: the helper checks where it reads.
    unsafe { bpf_probe_read_user(address as *const u64) }.ok()
}

#[inline(always)]
fn arg(ctx: &ProbeContext, n: usize) -> u64 {
    ctx.arg(n).unwrap_or(0)
}

/// A call begins. `key` is the address of a string; the rest is as in [`Call`].
#[inline(always)]
fn called(step: ShmStep, key: u64, size: u64, result: u64) -> Counter {
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
        let (Some(address), Some(len)) = (word(key), word(key + 8)) else {
            (&raw mut (*call).step).write(0);
            return Counter::LostShmUnreadable;
        };
        (&raw mut (*call).key).write(address);
        (&raw mut (*call).key_len).write(len);
        (&raw mut (*call).size).write(size);
        (&raw mut (*call).result).write(result);
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
fn returned(ctx: &ProbeContext, put: Success, get: Success) -> Counter {
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
        // Its begin was not seen.
        if step == 0 {
            return Counter::ShmIgnored;
        }
        let success = if step == ShmStep::StoreGet as u64 {
            get
        } else {
            put
        };
        let succeeded = if success == Success::Zero {
            RetProbeContext::new(ctx.as_ptr()).ret::<u64>() as u32 == 0
        } else {
            let pointer = word((&raw const (*call).result).read());
            pointer.is_some_and(|pointer| (pointer == 0) == (success == Success::NoError))
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
        (&raw mut (*header).size).write_volatile((&raw const (*call).size).read());
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
