//! The maps that programs share, and what they do with them.

use aya_ebpf::{
    bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use omnitap_ebpf::{Config, Counter};

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

/// The value of a process in `WATCHED`, if it is watched for one of these `omnitap_ebpf::watch` flags.
#[inline(always)]
pub(crate) fn watched(tgid: &u32, flags: u32) -> Option<*mut u32> {
    let value = WATCHED.get_ptr_mut(tgid)?;
    // SAFETY: a value of the map. Should the entry be removed and reused meanwhile, it holds the flags of
    // another watched process; the hit is then one more at the moment of a change.
    (unsafe { value.read_volatile() } & flags != 0).then_some(value)
}

/// Adds to a word of a map, atomically: a program that preempts this one may add to the same word.
///
/// The instruction is written out because core offers no `fetch_add` on this target.
///
/// # Safety
///
/// `to` must be a value of a map.
#[inline(always)]
pub(crate) unsafe fn add_u32(to: *mut u32, number: u32) {
    // SAFETY: of the caller.
    unsafe {
        core::arch::asm!("lock *(u32 *)({to} + 0) += {number}", to = in(reg) to, number = in(reg) u64::from(number))
    };
}

/// Adds 1 to a counter.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    if let Some(slot) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: as in `add_u32`.
        unsafe {
            core::arch::asm!("lock *(u64 *)({to} + 0) += {one}", to = in(reg) slot, one = in(reg) 1_u64)
        };
    }
}

/// `Config::capture_limit`.
#[inline(always)]
pub(crate) fn capture_limit() -> u64 {
    CONFIG.get(0).map_or(0, |config| u64::from(config.capture_limit))
}

/// The flags for submitting a record: whether to wake the reader (`Config::wakeup_bytes`).
#[inline(always)]
pub(crate) fn wakeup() -> u64 {
    let threshold = CONFIG.get(0).map_or(0, |config| u64::from(config.wakeup_bytes));
    if threshold == 0 {
        return 0;
    }
    if EVENTS.query(u64::from(BPF_RB_AVAIL_DATA)) >= threshold {
        u64::from(BPF_RB_FORCE_WAKEUP)
    } else {
        u64::from(BPF_RB_NO_WAKEUP)
    }
}
