//! What the exchanges on a process's connections come to.

/// A request and its answer, or one sentence on a speech WebSocket. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExchangeId(pub u64);

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/audio/speech`.
    Speech,
    /// A sentence on the WebSocket `/v1/audio/speech/stream`.
    Sentence,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/images/generations`.
    Images,
    /// `/v1/images/edits`.
    ImageEdits,
    /// Anything else: no single request to the engines, or one that no family needs.
    Other,
}

impl Endpoint {
    pub(super) fn of(method: &str, target: &str) -> Self {
        let path = target.split(['?', '#']).next().unwrap_or_default();
        // Behind a root path of a proxy the end of it is the same.
        let ends = |end: &str| path.trim_end_matches('/').ends_with(end);
        match method {
            "GET" if ends("/v1/audio/speech/stream") => Self::Sentence,
            "POST" if ends("/v1/audio/speech") => Self::Speech,
            "POST" if ends("/v1/chat/completions") => Self::Chat,
            "POST" if ends("/v1/completions") => Self::Completions,
            "POST" if ends("/v1/images/generations") => Self::Images,
            "POST" if ends("/v1/images/edits") => Self::ImageEdits,
            _ => Self::Other,
        }
    }

    /// What the engines' ids of such requests begin with.
    #[must_use]
    pub fn id_prefix(self) -> Option<&'static str> {
        match self {
            Self::Speech | Self::Sentence => Some("speech-"),
            Self::Chat => Some("chatcmpl-"),
            Self::Completions => Some("cmpl-"),
            Self::Images => Some("img_gen-"),
            Self::ImageEdits => Some("img_edit-"),
            Self::Other => None,
        }
    }

    /// Whether the answer may hold images.
    #[must_use]
    pub fn gives_images(self) -> bool {
        matches!(self, Self::Images | Self::ImageEdits | Self::Chat)
    }
}

/// What a request's body says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// Sample rate of the audio in Hz.
    pub sample_rate: Option<u32>,
    /// Images.
    pub images: Option<u32>,
    /// Denoising steps.
    pub steps: Option<u32>,
    /// Width and height of an image in pixels.
    pub size: Option<(u32, u32)>,
}

/// Audio that was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AudioChunk {
    /// Bytes of 16-bit samples; 0 where the chunk is not empty and its size is not known.
    pub bytes: u64,
    /// Samples a second, where the answer tells.
    pub sample_rate: Option<u32>,
    /// Channels, where the answer tells.
    pub channels: Option<u16>,
}

/// What an answer with images says of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageAnswer {
    /// Images, where all of the answer is known.
    pub count: Option<u32>,
    /// Width and height in pixels.
    pub size: Option<(u32, u32)>,
    /// Wait for the orchestrator in milliseconds.
    pub queue_wait_ms: Option<f64>,
    /// Preparation of the request before it in milliseconds.
    pub preprocess_ms: Option<f64>,
    /// Generation time by stage, in milliseconds.
    pub stage_gen_ms: Vec<(u32, f64)>,
    /// From the image stage being given the request to its first image, in milliseconds.
    pub first_image_ms: Option<f64>,
    /// Seconds in the VAE's decoder, with the pipeline profiler on.
    pub vae_decode_s: Option<f64>,
    /// Seconds in the denoising loop, with the pipeline profiler on.
    pub denoise_s: Option<f64>,
    /// Peak accelerator memory in MB.
    pub peak_memory_mb: Option<f64>,
}

impl ImageAnswer {
    /// Whether it has a time or figure of the engine's.
    #[must_use]
    pub fn has_metrics(&self) -> bool {
        self.queue_wait_ms.is_some() || !self.stage_gen_ms.is_empty()
    }
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The answer is complete.
    Whole,
    /// The answer is complete, and its stream tells of a failure.
    Failed,
    /// The client hung up, or can't be written to.
    ClientLeft {
        /// While a chunk was half written.
        mid_chunk: bool,
    },
    /// The server closed the connection before the answer was complete.
    Cut,
    /// Events are missing: how it ended is not known.
    Lost,
}

/// News of an exchange.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// Its head was read, or its sentence begun.
    Asked {
        /// What it asks for.
        endpoint: Endpoint,
        /// The id that the client asked for.
        request_id: Option<Box<str>>,
    },
    /// Its body was read.
    Read(Ask),
    /// The answer began.
    Answered {
        /// HTTP status.
        status: u16,
        /// It is a stream of speech.
        streams_speech: bool,
    },
    /// The answer names the request.
    Named(Box<str>),
    /// A chunk of audio of a stream was written, from this time on.
    Audio(AudioChunk),
    /// The answer has images.
    Images(ImageAnswer),
    /// It is over. The last news.
    Ended(End),
}
