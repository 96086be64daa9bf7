//! The maps that programs share, and what they do with them.

use aya_ebpf::{
    bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use omnitap_ebpf::{Config, Counter, WAKEUP_RECORD_MIN};

/// All records. The loader may give it another size.
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);

/// Process id to `omnitap_ebpf::watch` flags.
#[map]
static WATCHED: HashMap<u32, u32> = HashMap::with_max_entries(4096, 0);

#[map]
static CONFIG: Array<Config> = Array::with_max_entries(1, 0);

#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::ALL.len() as u32, 0);

/// Whether the process is watched for one of these `omnitap_ebpf::watch` flags.
#[inline(always)]
pub(crate) fn is_watched(tgid: u32, flags: u32) -> bool {
    // SAFETY: an entry that is removed and reused meanwhile holds the flags of another watched process; the
    // hit is then one more at the moment of a change.
    unsafe { WATCHED.get(tgid) }.is_some_and(|have| have & flags != 0)
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

/// `Config::capture_limit`.
#[inline(always)]
pub(crate) fn capture_limit() -> u64 {
    CONFIG.get(0).map_or(0, |config| u64::from(config.capture_limit))
}

/// The flags for submitting a record of this size: whether to wake the reader (`Config::wakeup_bytes`).
#[inline(always)]
pub(crate) fn wakeup(record_bytes: usize) -> u64 {
    let threshold = CONFIG.get(0).map_or(0, |config| u64::from(config.wakeup_bytes));
    if threshold == 0 {
        return 0;
    }
    // Small records fill no ring between two looks of the reader: they need not even know how full it is.
    if record_bytes >= WAKEUP_RECORD_MIN as usize && EVENTS.query(u64::from(BPF_RB_AVAIL_DATA)) >= threshold {
        return u64::from(BPF_RB_FORCE_WAKEUP);
    }
    u64::from(BPF_RB_NO_WAKEUP)
}
