//! The maps that programs share, and what they do with them.

use aya_ebpf::{
    bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    helpers::bpf_ktime_get_ns,
    macros::map,
    maps::{Array, PerCpuArray, RingBuf},
};
use omnitap_ebpf::{CAPTURE_LIMIT_MAX, CAPTURE_LIMIT_MIN, Counter, WAKEUP_RECORD_MIN, watch};

/// All records. The loader may give it another size.
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);

/// The `omnitap_ebpf::watch` flags of each process id.
#[map]
static WATCHED: Array<u64> = Array::with_max_entries(watch::WORDS, 0);

/// `Config::capture_limit`; set by the loader.
#[unsafe(no_mangle)]
static CAPTURE_LIMIT: u32 = CAPTURE_LIMIT_MAX;

/// `Config::wakeup_bytes`; set by the loader.
#[unsafe(no_mangle)]
static WAKEUP_BYTES: u32 = 0;

#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::ALL.len() as u32, 0);

/// Whether the process is watched for one of these `omnitap_ebpf::watch` flags.
#[inline(always)]
pub(crate) fn is_watched(tgid: u32, flags: u64) -> bool {
    let (word, shift) = watch::place(tgid);
    WATCHED.get(word).is_some_and(|word| *word >> shift & flags != 0)
}

/// `CLOCK_MONOTONIC` in nanoseconds.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_ns() }
}

/// Adds 1 to a counter.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    if let Some(slot) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: a value of the map.
        unsafe { add(slot, 1) };
    }
}

/// Adds to a word, atomically: a program that preempts this one, on the same CPU even, may add to the same.
///
/// The instruction is written out because core offers no `fetch_add` on this target.
///
/// # Safety
///
/// `to` must be a word of a map.
#[inline(always)]
pub(crate) unsafe fn add(to: *mut u64, number: u64) {
    // SAFETY: of the caller.
    unsafe {
        core::arch::asm!("lock *(u64 *)({to} + 0) += {number}", to = in(reg) to, number = in(reg) number);
    }
}

/// `Config::capture_limit`. A load from a cold page: not for frames of at most `CAPTURE_LIMIT_MIN`.
#[inline(always)]
pub(crate) fn capture_limit() -> u64 {
    setting(&CAPTURE_LIMIT).clamp(u64::from(CAPTURE_LIMIT_MIN), u64::from(CAPTURE_LIMIT_MAX))
}

/// The flags for submitting a record of this size: whether to wake the reader (`Config::wakeup_bytes`).
#[inline(always)]
pub(crate) fn wakeup(record_bytes: usize) -> u64 {
    // Small records fill no ring between two looks of the reader: they need not even know how full it is.
    if record_bytes >= WAKEUP_RECORD_MIN as usize
        && EVENTS.query(u64::from(BPF_RB_AVAIL_DATA)) >= setting(&WAKEUP_BYTES)
    {
        return u64::from(BPF_RB_FORCE_WAKEUP);
    }
    u64::from(BPF_RB_NO_WAKEUP)
}

/// The loader changes the value: the compiler must not take the one that stands here.
#[inline(always)]
fn setting(value: &'static u32) -> u64 {
    // SAFETY: a reference is valid for reads.
    u64::from(unsafe { core::ptr::from_ref(value).read_volatile() })
}
