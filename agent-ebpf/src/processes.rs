//! Processes that start, fork and end.
//!
//! Raw tracepoints: they run in the process concerned, whose id a helper gives, so they need no tracefs and
//! no offsets of fields.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::raw_tracepoint, programs::RawTracePointContext};
use omnitap_ebpf::{Counter, Kind, ProcessRecord, watch};

use crate::maps::{EVENTS, count, is_watched, now, wakeup};

/// `CLONE_THREAD` of `clone(2)`: the new task is a thread of the same process.
const CLONE_THREAD: u64 = 0x0001_0000;

/// `sched_process_exec(task, old_pid, binprm)`, in the task, after it has taken the process's id.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
fn process_exec(_: RawTracePointContext) {
    report(Kind::Exec, (bpf_get_current_pid_tgid() >> 32) as u32);
}

/// `task_newtask(task, clone_flags)`, in the parent.
#[raw_tracepoint(tracepoint = "task_newtask")]
fn process_fork(ctx: RawTracePointContext) {
    if ctx.arg::<u64>(1) & CLONE_THREAD != 0 {
        return;
    }
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    if is_watched(tgid, watch::LIFE) {
        report(Kind::Fork, tgid);
    }
}

/// `sched_process_exit(task, ...)`, in each thread that ends.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
fn process_exit(_: RawTracePointContext) {
    let id = bpf_get_current_pid_tgid();
    let tgid = (id >> 32) as u32;
    if id as u32 == tgid && is_watched(tgid, watch::LIFE) {
        report(Kind::Exit, tgid);
    }
}

#[inline(always)]
fn report(kind: Kind, tgid: u32) {
    let Some(mut record) = EVENTS.reserve::<ProcessRecord>(0) else {
        count(Counter::LostProcess);
        return;
    };
    record.write(ProcessRecord {
        kind: kind as u32,
        tgid,
        time_ns: now(),
    });
    record.submit(wakeup(size_of::<ProcessRecord>()));
    count(Counter::Process);
}
