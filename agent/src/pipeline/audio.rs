//! Audio of one request: frames, sample rate and the player simulation behind the continuity families.

use crate::metrics::number::as_f64;

/// Underrun that a listener is taken not to notice, in seconds (docs/wire.md section "Audio continuity").
pub const CONTINUITY_THRESHOLD_S: f64 = 0.1;

/// Label value of `threshold_ms` for [`CONTINUITY_THRESHOLD_S`].
pub const CONTINUITY_THRESHOLD_MS: &str = "100";

/// Sample rate of audio that names none, in Hz: what the server itself falls back to.
pub const DEFAULT_SAMPLE_RATE: u32 = 24_000;

/// Bytes of one mono sample as a player gets it: 16-bit PCM.
pub const SAMPLE_WIDTH: u64 = 2;

/// A player that starts with the first chunk and never stops its clock, fed one chunk at a time.
///
/// Keeps the order of operations of the server's batch computation, so that the same chunks give the same bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Continuity {
    bytes_per_s: f64,
    first_s: Option<f64>,
    received: u64,
    max_underrun_s: f64,
    underruns: u32,
}

impl Continuity {
    /// A player of PCM with `sample_rate` in Hz, `sample_width` bytes a sample and `channels`.
    #[must_use]
    pub fn new(sample_rate: u32, sample_width: u64, channels: u64) -> Self {
        let bytes_per_s = u64::from(sample_rate)
            .saturating_mul(sample_width)
            .saturating_mul(channels);
        Self {
            bytes_per_s: as_f64(bytes_per_s),
            first_s: None,
            received: 0,
            max_underrun_s: 0.0,
            underruns: 0,
        }
    }

    /// A chunk of `bytes` arrived at `time_s`; times must not run backwards.
    pub fn push(&mut self, time_s: f64, bytes: u64) {
        match self.first_s {
            None => self.first_s = Some(time_s),
            Some(first_s) if self.bytes_per_s > 0.0 => {
                let played = (time_s - first_s) * self.bytes_per_s;
                let deficit = played - as_f64(self.received);
                if deficit > 0.0 {
                    let deficit_s = deficit / self.bytes_per_s;
                    if deficit_s > self.max_underrun_s {
                        self.max_underrun_s = deficit_s;
                    }
                    self.underruns = self.underruns.saturating_add(1);
                }
            }
            Some(_) => {}
        }
        self.received = self.received.saturating_add(bytes);
    }

    /// The worst deficit so far, in seconds.
    #[must_use]
    pub fn max_underrun_s(&self) -> f64 {
        self.max_underrun_s
    }

    /// Chunks that came after the player had run dry.
    #[must_use]
    pub fn underruns(&self) -> u32 {
        self.underruns
    }

    /// Whether the worst deficit stayed within `threshold_s`.
    #[must_use]
    pub fn is_continuous(&self, threshold_s: f64) -> bool {
        self.max_underrun_s <= threshold_s
    }
}

/// What one stage gave of a request's audio.
#[derive(Clone, Debug)]
pub(super) struct AudioState {
    /// Samples of one channel.
    pub(super) frames: u64,
    /// First sample rate on the wire.
    sample_rate: Option<u32>,
    /// Rate that `player` runs at.
    player_rate: u32,
    player: Continuity,
    /// Time of the first output with samples.
    pub(super) first_ns: Option<u64>,
    /// Whether the time to it has been told.
    pub(super) first_packet: FirstPacket,
}

/// Whether `audio_ttfp_s` has its sample of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstPacket {
    /// Not yet: no audio, or the request's ADD has not been seen. Settled when the request completes.
    Pending,
    /// It has.
    Told,
}

impl FirstPacket {
    pub(super) fn is_pending(self) -> bool {
        self == Self::Pending
    }
}

impl AudioState {
    /// `likely_rate` is the rate that the stage used last: the first chunk of a request may come without one.
    pub(super) fn new(sample_rate: Option<u32>, likely_rate: Option<u32>) -> Self {
        let player_rate = sample_rate.or(likely_rate).unwrap_or(DEFAULT_SAMPLE_RATE);
        Self {
            frames: 0,
            sample_rate: None,
            player_rate,
            player: Continuity::new(player_rate, SAMPLE_WIDTH, 1),
            first_ns: None,
            first_packet: FirstPacket::Pending,
        }
    }

    /// Adds an output's audio. `time_s` is any monotonic second count, the same base for a whole request.
    pub(super) fn push(&mut self, time_ns: u64, frames: u64, sample_rate: Option<u32>) {
        if self.sample_rate.is_none() {
            self.sample_rate = sample_rate.filter(|&rate| rate > 0);
        }
        if frames == 0 {
            return;
        }
        let first_ns = *self.first_ns.get_or_insert(time_ns);
        self.frames = self.frames.saturating_add(frames);
        self.player.push(
            seconds_between(first_ns, time_ns),
            frames.saturating_mul(SAMPLE_WIDTH),
        );
    }

    /// Rate of the request's audio in Hz.
    pub(super) fn rate(&self) -> u32 {
        self.sample_rate.unwrap_or(DEFAULT_SAMPLE_RATE)
    }

    /// Duration of the content in seconds.
    pub(super) fn duration_s(&self) -> f64 {
        as_f64(self.frames) / f64::from(self.rate())
    }

    /// The player, unless it ran at another rate than the audio turned out to have.
    pub(super) fn continuity(&self) -> Option<Continuity> {
        (self.player_rate == self.rate()).then_some(self.player)
    }
}

/// Seconds from `start_ns` to `end_ns`; 0 where the end comes first.
pub(super) fn seconds_between(start_ns: u64, end_ns: u64) -> f64 {
    as_f64(end_ns.saturating_sub(start_ns)) / 1e9
}
