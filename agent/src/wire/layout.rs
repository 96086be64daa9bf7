//! Which element of a positional struct is what, by version (docs/wire.md section "Versions").
//!
//! vLLM writes its structs as arrays without names, and each release may add or move elements. A layout is a
//! list of the elements' names; what an element's type may be follows from its name, so the same table also
//! tells layouts apart where no version is known. A new release is a new row.

use super::{
    WireError,
    msgpack::{MsgpackError, Reader, marker},
};
use crate::host::identity::{Flavor, Versions};

/// Elements of an output that never moved (vLLM 0.18 to 0.33).
const OUTPUT_COMMON: usize = 9;
/// Elements of a request that never moved (vLLM 0.18 to 0.33).
const ADD_COMMON: usize = 10;
/// Longest layout that a row can have.
const LONGEST: usize = 28;

/// An element of `EngineCoreOutput`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputField {
    RequestId,
    NewTokenIds,
    Logprobs,
    PromptLogprobs,
    PoolingOutput,
    FinishReason,
    StopReason,
    Events,
    KvTransfer,
    EcTransfer,
    TraceHeaders,
    /// `num_cached_tokens` and `num_external_computed_tokens` of vLLM 0.18 and 0.19.
    CachedTokens,
    PrefillStats,
    RoutedExperts,
    Nans,
    MmCacheMisses,
    SamplingMask,
    SpecDecodeMetrics,
    PromptIdLogprobs,
    Error,
    // vLLM-Omni
    Multimodal,
    PoolingPayload,
    SegmentFinished,
    PromptLength,
    GenerationTokens,
}

impl OutputField {
    /// Whether a value that starts with this marker can be this element.
    fn admits(self, first: u8) -> bool {
        match self {
            Self::RequestId => is_str(first),
            Self::NewTokenIds => is_array(first),
            Self::Logprobs | Self::PromptLogprobs | Self::StopReason => true,
            Self::PoolingOutput => is_nil(first) || is_array(first) || is_map(first),
            Self::FinishReason | Self::PromptLength | Self::GenerationTokens => {
                is_nil(first) || is_int(first)
            }
            Self::CachedTokens | Self::Nans => is_int(first),
            Self::Events | Self::RoutedExperts | Self::MmCacheMisses | Self::SamplingMask => {
                is_nil(first) || is_array(first)
            }
            Self::KvTransfer
            | Self::EcTransfer
            | Self::TraceHeaders
            | Self::PrefillStats
            | Self::Error
            | Self::Multimodal
            | Self::PoolingPayload => is_nil(first) || is_map(first),
            Self::SpecDecodeMetrics | Self::PromptIdLogprobs => {
                is_nil(first) || is_map(first) || is_array(first)
            }
            Self::SegmentFinished => is_nil(first) || is_bool(first),
        }
    }
}

/// An element of `EngineCoreRequest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AddField {
    RequestId,
    PromptTokenIds,
    MmFeatures,
    SamplingParams,
    PoolingParams,
    ArrivalTime,
    LoraRequest,
    CacheSalt,
    DataParallelRank,
    PromptEmbeds,
    PromptIsTokenIds,
    ClientIndex,
    CurrentWave,
    Priority,
    TraceHeaders,
    Resumable,
    ExternalReqId,
    ReasoningEnded,
    ReasoningParserKwargs,
    AbortImmediately,
    SessionId,
    KvHints,
    // vLLM-Omni
    AdditionalInformation,
    IntermediateBuffer,
    PayloadSenderInfo,
}

impl AddField {
    /// Whether a value that starts with this marker can be this element.
    pub(super) fn admits(self, first: u8) -> bool {
        match self {
            Self::RequestId => is_str(first),
            Self::PromptTokenIds | Self::MmFeatures | Self::PromptEmbeds | Self::PromptIsTokenIds => {
                is_nil(first) || is_array(first)
            }
            Self::ArrivalTime => first == marker::F64,
            Self::CacheSalt | Self::ExternalReqId | Self::SessionId => is_nil(first) || is_str(first),
            Self::DataParallelRank => is_nil(first) || is_int(first),
            Self::ClientIndex | Self::CurrentWave | Self::Priority => is_int(first),
            Self::TraceHeaders
            | Self::ReasoningParserKwargs
            | Self::AdditionalInformation
            | Self::IntermediateBuffer
            | Self::PayloadSenderInfo => is_nil(first) || is_map(first),
            Self::Resumable | Self::AbortImmediately => is_bool(first),
            Self::ReasoningEnded => is_nil(first) || is_bool(first),
            Self::SamplingParams | Self::PoolingParams | Self::LoraRequest | Self::KvHints => {
                is_nil(first) || is_map(first) || is_array(first)
            }
        }
    }
}

fn is_nil(first: u8) -> bool {
    first == marker::NIL
}

fn is_bool(first: u8) -> bool {
    matches!(first, marker::FALSE | marker::TRUE)
}

fn is_int(first: u8) -> bool {
    matches!(first, 0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xd3)
}

fn is_str(first: u8) -> bool {
    matches!(first, 0xa0..=0xbf | 0xd9..=0xdb)
}

fn is_array(first: u8) -> bool {
    matches!(first, 0x90..=0x9f | 0xdc | 0xdd)
}

fn is_map(first: u8) -> bool {
    matches!(first, 0x80..=0x8f | 0xde | 0xdf)
}

/// Layout of one output.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputLayout {
    fields: [OutputField; LONGEST],
    len: usize,
    /// What follows the token ids of an output that brings nothing but tokens: the defaults of all elements
    /// up to `GenerationTokens`, where there is one, else to the end. By far the most outputs are such.
    plain: [u8; LONGEST],
    plain_len: usize,
}

impl OutputLayout {
    const fn new(base: &[OutputField], tail: &[OutputField]) -> Self {
        const COMMON: [OutputField; OUTPUT_COMMON] = [
            OutputField::RequestId,
            OutputField::NewTokenIds,
            OutputField::Logprobs,
            OutputField::PromptLogprobs,
            OutputField::PoolingOutput,
            OutputField::FinishReason,
            OutputField::StopReason,
            OutputField::Events,
            OutputField::KvTransfer,
        ];
        let mut fields = [OutputField::Logprobs; LONGEST];
        let len = OUTPUT_COMMON + base.len() + tail.len();
        let mut plain = [marker::NIL; LONGEST];
        let mut plain_len = 0;
        let mut i = 0;
        while i < len {
            let field = if i < OUTPUT_COMMON {
                COMMON[i]
            } else if i < OUTPUT_COMMON + base.len() {
                base[i - OUTPUT_COMMON]
            } else {
                tail[i - OUTPUT_COMMON - base.len()]
            };
            fields[i] = field;
            if i >= 2 && !matches!(field, OutputField::GenerationTokens) {
                plain[plain_len] = match field {
                    OutputField::Nans | OutputField::CachedTokens => 0,
                    OutputField::SegmentFinished => marker::FALSE,
                    _ => marker::NIL,
                };
                plain_len += 1;
            }
            i += 1;
        }
        Self {
            fields,
            len,
            plain,
            plain_len,
        }
    }

    /// Names of the elements in order.
    pub(super) fn fields(&self) -> &[OutputField] {
        self.fields.get(..self.len).unwrap_or_default()
    }

    /// Elements behind the token ids where all have their defaults; `GenerationTokens`, always the last,
    /// excepted.
    #[inline]
    pub(super) fn plain(&self) -> &[u8] {
        self.plain.get(..self.plain_len).unwrap_or_default()
    }

    /// Whether the last element is `GenerationTokens`.
    #[inline]
    pub(super) fn counts_tokens(&self) -> bool {
        self.plain_len + 2 < self.len
    }

    /// Whether the elements' types fit this layout. The reader stands behind the array header.
    fn fits(&self, mut reader: Reader<'_>) -> Result<bool, MsgpackError> {
        for field in self.fields() {
            if !field.admits(reader.peek()?) {
                return Ok(false);
            }
            reader.skip()?;
        }
        Ok(true)
    }
}

/// Layout of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct AddLayout {
    fields: [AddField; LONGEST],
    len: usize,
}

impl AddLayout {
    const fn new(base: &[AddField], tail: &[AddField]) -> Self {
        const COMMON: [AddField; ADD_COMMON] = [
            AddField::RequestId,
            AddField::PromptTokenIds,
            AddField::MmFeatures,
            AddField::SamplingParams,
            AddField::PoolingParams,
            AddField::ArrivalTime,
            AddField::LoraRequest,
            AddField::CacheSalt,
            AddField::DataParallelRank,
            AddField::PromptEmbeds,
        ];
        let mut fields = [AddField::MmFeatures; LONGEST];
        let len = ADD_COMMON + base.len() + tail.len();
        let mut i = 0;
        while i < len {
            fields[i] = if i < ADD_COMMON {
                COMMON[i]
            } else if i < ADD_COMMON + base.len() {
                base[i - ADD_COMMON]
            } else {
                tail[i - ADD_COMMON - base.len()]
            };
            i += 1;
        }
        Self { fields, len }
    }

    /// Names of the elements in order.
    pub(super) fn fields(&self) -> &[AddField] {
        self.fields.get(..self.len).unwrap_or_default()
    }
}

/// A release: major, minor, patch.
type Release = (u16, u16, u16);

/// A vLLM release and those after it, up to the next row.
struct VllmRow {
    since: Release,
    /// Elements of `EngineCoreOutputs`.
    outer: u32,
    output: &'static [OutputField],
    add: &'static [AddField],
}

/// A vLLM-Omni release and those after it, up to the next row: what it appends to vLLM's structs.
struct OmniRow {
    since: Release,
    output: &'static [OutputField],
    add: &'static [AddField],
}

mod rows {
    use super::{AddField as A, OmniRow, OutputField as O, VllmRow};

    const OUT_18: &[O] = &[
        O::TraceHeaders,
        O::CachedTokens,
        O::CachedTokens,
        O::RoutedExperts,
        O::Nans,
    ];
    const OUT_20: &[O] = &[O::TraceHeaders, O::PrefillStats, O::RoutedExperts, O::Nans];
    const OUT_26: &[O] = &[
        O::EcTransfer,
        O::TraceHeaders,
        O::PrefillStats,
        O::RoutedExperts,
        O::Nans,
    ];
    const OUT_28: &[O] = &[
        O::EcTransfer,
        O::TraceHeaders,
        O::PrefillStats,
        O::RoutedExperts,
        O::Nans,
        O::MmCacheMisses,
        O::SamplingMask,
    ];
    const OUT_29: &[O] = &[
        O::EcTransfer,
        O::TraceHeaders,
        O::PrefillStats,
        O::RoutedExperts,
        O::Nans,
        O::MmCacheMisses,
        O::SamplingMask,
        O::SpecDecodeMetrics,
    ];
    const OUT_31: &[O] = &[
        O::EcTransfer,
        O::TraceHeaders,
        O::PrefillStats,
        O::RoutedExperts,
        O::Nans,
        O::MmCacheMisses,
        O::SamplingMask,
        O::SpecDecodeMetrics,
        O::PromptIdLogprobs,
    ];
    const OUT_33: &[O] = &[
        O::EcTransfer,
        O::TraceHeaders,
        O::PrefillStats,
        O::RoutedExperts,
        O::Nans,
        O::MmCacheMisses,
        O::SamplingMask,
        O::SpecDecodeMetrics,
        O::PromptIdLogprobs,
        O::Error,
    ];

    const ADD_18: &[A] = &[
        A::ClientIndex,
        A::CurrentWave,
        A::Priority,
        A::TraceHeaders,
        A::Resumable,
        A::ExternalReqId,
        A::ReasoningEnded,
    ];
    const ADD_20_1: &[A] = &[
        A::ClientIndex,
        A::CurrentWave,
        A::Priority,
        A::TraceHeaders,
        A::Resumable,
        A::ExternalReqId,
        A::ReasoningEnded,
        A::ReasoningParserKwargs,
    ];
    const ADD_21: &[A] = &[
        A::PromptIsTokenIds,
        A::ClientIndex,
        A::CurrentWave,
        A::Priority,
        A::TraceHeaders,
        A::Resumable,
        A::ExternalReqId,
        A::ReasoningEnded,
        A::ReasoningParserKwargs,
        A::AbortImmediately,
    ];
    const ADD_28: &[A] = &[
        A::PromptIsTokenIds,
        A::ClientIndex,
        A::CurrentWave,
        A::Priority,
        A::TraceHeaders,
        A::Resumable,
        A::ExternalReqId,
        A::ReasoningEnded,
        A::ReasoningParserKwargs,
        A::AbortImmediately,
        A::SessionId,
    ];
    const ADD_31: &[A] = &[
        A::PromptIsTokenIds,
        A::ClientIndex,
        A::CurrentWave,
        A::Priority,
        A::TraceHeaders,
        A::Resumable,
        A::ExternalReqId,
        A::ReasoningEnded,
        A::ReasoningParserKwargs,
        A::AbortImmediately,
        A::SessionId,
        A::KvHints,
    ];

    /// In order of release.
    pub(super) const VLLM: &[VllmRow] = &[
        VllmRow {
            since: (0, 18, 0),
            outer: 8,
            output: OUT_18,
            add: ADD_18,
        },
        VllmRow {
            since: (0, 20, 0),
            outer: 8,
            output: OUT_20,
            add: ADD_18,
        },
        VllmRow {
            since: (0, 20, 1),
            outer: 8,
            output: OUT_20,
            add: ADD_20_1,
        },
        VllmRow {
            since: (0, 21, 0),
            outer: 8,
            output: OUT_20,
            add: ADD_21,
        },
        VllmRow {
            since: (0, 26, 0),
            outer: 8,
            output: OUT_26,
            add: ADD_21,
        },
        VllmRow {
            since: (0, 28, 0),
            outer: 8,
            output: OUT_28,
            add: ADD_28,
        },
        VllmRow {
            since: (0, 29, 0),
            outer: 8,
            output: OUT_29,
            add: ADD_28,
        },
        VllmRow {
            since: (0, 31, 0),
            outer: 8,
            output: OUT_31,
            add: ADD_31,
        },
        VllmRow {
            since: (0, 32, 0),
            outer: 9,
            output: OUT_31,
            add: ADD_31,
        },
        VllmRow {
            since: (0, 33, 0),
            outer: 9,
            output: OUT_33,
            add: ADD_31,
        },
    ];
    /// The first release that nobody has looked at.
    pub(super) const VLLM_END: super::Release = (0, 34, 0);

    /// In order of release. Before 0.24 audio is in `pooling_output`, as a map.
    pub(super) const OMNI: &[OmniRow] = &[
        OmniRow {
            since: (0, 18, 0),
            output: &[],
            add: &[A::AdditionalInformation],
        },
        OmniRow {
            since: (0, 20, 0),
            output: &[O::SegmentFinished, O::PromptLength],
            add: &[A::AdditionalInformation],
        },
        OmniRow {
            since: (0, 24, 0),
            output: &[O::Multimodal, O::SegmentFinished, O::PromptLength],
            add: &[A::AdditionalInformation],
        },
        OmniRow {
            since: (0, 26, 0),
            output: &[O::Multimodal, O::SegmentFinished, O::PromptLength],
            add: &[A::AdditionalInformation, A::IntermediateBuffer],
        },
        OmniRow {
            since: (0, 30, 0),
            output: &[
                O::Multimodal,
                O::PoolingPayload,
                O::SegmentFinished,
                O::PromptLength,
                O::GenerationTokens,
            ],
            add: &[
                A::AdditionalInformation,
                A::IntermediateBuffer,
                A::PayloadSenderInfo,
            ],
        },
    ];
    /// The first release that nobody has looked at.
    pub(super) const OMNI_END: super::Release = (0, 31, 0);

    /// Which vLLM each vLLM-Omni is made for, to tell layouts apart by shape.
    pub(super) const PAIRS: &[(super::Release, super::Release)] = &[
        ((0, 18, 0), (0, 18, 0)),
        ((0, 20, 0), (0, 20, 0)),
        ((0, 20, 0), (0, 20, 1)),
        ((0, 22, 0), (0, 22, 0)),
        ((0, 24, 0), (0, 24, 0)),
        ((0, 26, 0), (0, 26, 0)),
        ((0, 28, 0), (0, 28, 0)),
        ((0, 30, 0), (0, 30, 0)),
    ];
}

fn vllm_row(release: Release) -> Option<&'static VllmRow> {
    (release < rows::VLLM_END).then(|| rows::VLLM.iter().rev().find(|row| row.since <= release))?
}

fn omni_row(release: Release) -> Option<&'static OmniRow> {
    (release < rows::OMNI_END).then(|| rows::OMNI.iter().rev().find(|row| row.since <= release))?
}

/// `0.30.1rc2` is 0.30.1. A development build is between releases: its layout is known by shape alone.
fn release(version: &str) -> Option<Release> {
    if version.contains("dev") {
        return None;
    }
    let mut parts = version.split('.').map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..digits).and_then(|number| number.parse().ok())
    });
    let major = parts.next()??;
    let minor = parts.next()??;
    let patch = parts.next().flatten().unwrap_or(0);
    Some((major, minor, patch))
}

/// Layouts of the struct that a pipeline's software writes, and of vLLM's own struct below it: vLLM-Omni's
/// synthetic abort outputs have the latter.
#[derive(Clone, Copy, Debug)]
struct Known {
    outer: u32,
    output: OutputLayout,
    base_output: OutputLayout,
    add: AddLayout,
    base_add: AddLayout,
}

/// The layouts of one process.
#[derive(Clone, Debug)]
pub struct Layouts {
    flavor: Flavor,
    known: Option<Known>,
}

impl Layouts {
    /// By the package versions; where they tell nothing, each struct's own shape decides.
    #[must_use]
    pub fn new(flavor: Flavor, versions: &Versions) -> Self {
        let vllm = versions.vllm.as_deref().and_then(release);
        let omni = versions.omni.as_deref().and_then(release);
        let known = match flavor {
            Flavor::Vllm => vllm.and_then(|vllm| known(vllm, None)),
            // One of the two may be unknown. Releases of the same number belong together, and vLLM-Omni has
            // even ones.
            Flavor::Omni => match (vllm, omni) {
                (Some(vllm), Some(omni)) => known(vllm, Some(omni)),
                (Some(vllm), None) if vllm.1 % 2 == 0 => known(vllm, Some(vllm)),
                (None, Some(omni)) => known(omni, Some(omni)),
                _ => None,
            },
        };
        Self { flavor, known }
    }

    /// Whether versions told the layout.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// Checks the number of elements of `EngineCoreOutputs`.
    pub(super) fn check_outer(&self, length: u32) -> Result<(), WireError> {
        let expected = self.known.as_ref().map(|known| known.outer);
        if expected.map_or(matches!(length, 8 | 9), |outer| outer == length) {
            return Ok(());
        }
        Err(WireError::UnknownLayout {
            what: "EngineCoreOutputs",
            length,
            expected,
        })
    }

    /// The layout of an output of `length` elements. The reader stands behind the array header.
    #[inline]
    pub(super) fn output(&self, length: u32, reader: &Reader<'_>) -> Result<&OutputLayout, WireError> {
        match &self.known {
            Some(known) if known.output.len == length as usize => Ok(&known.output),
            Some(known) if known.base_output.len == length as usize => Ok(&known.base_output),
            Some(known) => Err(WireError::UnknownLayout {
                what: "EngineCoreOutput",
                length,
                expected: u32::try_from(known.output.len).ok(),
            }),
            None => self.output_by_shape(length, *reader),
        }
    }

    #[cold]
    fn output_by_shape(&self, length: u32, reader: Reader<'_>) -> Result<&'static OutputLayout, WireError> {
        // vLLM-Omni's own layouts come first: where a length has two candidates, and both fit, the element
        // that differs (`is_segment_finished`) is nil, and the two read the same.
        for layout in shapes::outputs(self.flavor) {
            if layout.len == length as usize && layout.fits(reader)? {
                return Ok(layout);
            }
        }
        Err(WireError::UnknownLayout {
            what: "EngineCoreOutput",
            length,
            expected: None,
        })
    }

    /// The layout of a request of `length` elements.
    pub(super) fn add(&self, length: u32) -> Result<&AddLayout, WireError> {
        let unknown = |expected: Option<usize>| WireError::UnknownLayout {
            what: "EngineCoreRequest",
            length,
            expected: expected.and_then(|length| u32::try_from(length).ok()),
        };
        match &self.known {
            Some(known) if known.add.len == length as usize => Ok(&known.add),
            Some(known) if known.base_add.len == length as usize => Ok(&known.base_add),
            Some(known) => Err(unknown(Some(known.add.len))),
            // Within one flavor every length belongs to one layout.
            None => shapes::adds(self.flavor)
                .find(|layout| layout.len == length as usize)
                .ok_or_else(|| unknown(None)),
        }
    }
}

fn known(vllm: Release, omni: Option<Release>) -> Option<Known> {
    let base = vllm_row(vllm)?;
    let (output, add): (&[OutputField], &[AddField]) = match omni {
        Some(omni) => omni_row(omni).map(|row| (row.output, row.add))?,
        None => (&[], &[]),
    };
    Some(Known {
        outer: base.outer,
        output: OutputLayout::new(base.output, output),
        base_output: OutputLayout::new(base.output, &[]),
        add: AddLayout::new(base.add, add),
        base_add: AddLayout::new(base.add, &[]),
    })
}

/// All layouts of the tables, to choose from by shape.
mod shapes {
    use std::sync::LazyLock;

    use super::{AddLayout, Flavor, Known, OutputLayout, known, rows};

    static VLLM: LazyLock<Vec<Known>> = LazyLock::new(|| {
        rows::VLLM
            .iter()
            .filter_map(|row| known(row.since, None))
            .collect()
    });
    static OMNI: LazyLock<Vec<Known>> = LazyLock::new(|| {
        rows::PAIRS
            .iter()
            .filter_map(|&(omni, vllm)| known(vllm, Some(omni)))
            .collect()
    });

    fn table(flavor: Flavor) -> &'static [Known] {
        match flavor {
            Flavor::Vllm => &VLLM,
            Flavor::Omni => &OMNI,
        }
    }

    pub(super) fn outputs(flavor: Flavor) -> impl Iterator<Item = &'static OutputLayout> {
        let rows = table(flavor);
        rows.iter()
            .map(|row| &row.output)
            .chain(rows.iter().map(|row| &row.base_output))
    }

    pub(super) fn adds(flavor: Flavor) -> impl Iterator<Item = &'static AddLayout> {
        table(flavor).iter().map(|row| &row.add)
    }
}
