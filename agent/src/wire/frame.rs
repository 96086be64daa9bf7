//! One ZMQ frame as the tap saw it.

/// Header and captured bytes of one frame handed to `zmq_msg_send`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// `CLOCK_MONOTONIC` at the call, in nanoseconds.
    pub time_ns: u64,
    /// Sending process (initial PID namespace).
    pub pid: u32,
    /// Sending thread.
    pub tid: u32,
    /// Address of the libzmq socket in that process: tells sockets apart, never followed.
    pub socket: u64,
    /// Address of the content: with `size` and `socket` it tells a retried send from a new one.
    pub content: u64,
    /// Size of the whole frame in bytes.
    pub size: u64,
    /// More frames of the same message follow (`ZMQ_SNDMORE`).
    pub more: bool,
    /// A follow-on part behind the message's payload: header only, `head` and `tail` are empty.
    pub aux: bool,
    /// First captured bytes.
    pub head: &'a [u8],
    /// Last captured bytes, where the frame was longer than the capture limit; else empty.
    pub tail: &'a [u8],
}

impl Frame<'_> {
    /// Whether `head` is the whole frame.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.head.len() as u64 == self.size
    }
}
