//! Stage and replica of diffusion stages, whose processes tell neither: what is given, the command line, elimination,
//! and the order of their start (docs/wire.md section "Diffusion").

use std::collections::BTreeSet;

use super::identity::Role;

/// Stage and replica ids.
pub type Place = (u32, u32);

/// Where the diffusion stages of pipelines with a certain command line stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// Part of the command line of the pipeline's API server or headless launcher.
    pub pattern: String,
    /// Places in the order in which the processes start.
    pub places: Vec<Place>,
}

/// What is known of a pipeline beside its diffusion stages.
#[derive(Clone, Debug, Default)]
pub(super) struct Known<'a> {
    /// Its LLM stages on this host.
    pub(super) llm: BTreeSet<u32>,
    /// `--stage-id`: the one stage whose replicas run on this host.
    pub(super) stage: Option<u32>,
    /// A server of the pipeline is here, from which its stages are counted.
    pub(super) has_server: bool,
    /// The replicas are numbered by a server elsewhere.
    pub(super) is_headless: bool,
    /// Places from the configuration.
    pub(super) given: &'a [Place],
}

/// Fills in what is missing. `roles` are in the order of the processes' start; roles of other kinds are left alone. A
/// process keeps its place for life, unless an LLM stage turns out to stand there.
pub(super) fn settle(mut roles: Vec<&mut Role>, known: &Known<'_>) {
    let mut taken = BTreeSet::new();
    let mut count = 0;
    for role in &mut roles {
        let Role::DiffusionStage { stage, replica } = &mut **role else {
            continue;
        };
        count += 1;
        if stage.is_some_and(|stage| known.llm.contains(&stage)) {
            (*stage, *replica) = (None, None);
        }
        taken.extend(stage.zip(*replica));
    }
    for role in roles {
        let Role::DiffusionStage { stage, replica } = role else {
            continue;
        };
        if stage.is_some() {
            continue;
        }
        if let Some(place) = known.given.iter().find(|place| !taken.contains(*place)) {
            (*stage, *replica) = (Some(place.0), Some(place.1));
        } else if known.given.is_empty() && known.has_server {
            *stage = known.stage.or_else(|| eliminate(&known.llm, &taken, count));
            if let Some(stage) = *stage
                && !known.is_headless
            {
                *replica = (0..=u32::MAX).find(|replica| !taken.contains(&(stage, *replica)));
            }
        }
        taken.extend(stage.zip(*replica));
    }
}

/// The stage that no LLM stage is: the gap in their numbers, else the one behind them all. With several gaps there has
/// to be one process for each.
fn eliminate(llm: &BTreeSet<u32>, taken: &BTreeSet<Place>, processes: usize) -> Option<u32> {
    /// Stages beyond any pipeline's: a title may claim what it likes.
    const MOST: u32 = 64;
    let last = llm.last().copied().unwrap_or_default().min(MOST);
    let gaps: Vec<u32> = (0..last).filter(|stage| !llm.contains(stage)).collect();
    match gaps[..] {
        [] => Some(llm.last().map_or(0, |last| last.saturating_add(1))),
        [gap] => Some(gap),
        _ if gaps.len() == processes => gaps
            .into_iter()
            .find(|gap| !taken.iter().any(|(stage, _)| stage == gap)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    type Told = (Option<u32>, Option<u32>);

    const UNKNOWN: Told = (None, None);

    fn known(llm: &[u32]) -> Known<'static> {
        Known {
            llm: llm.iter().copied().collect(),
            has_server: true,
            ..Known::default()
        }
    }

    fn settled(before: &[Told], known: &Known<'_>) -> Vec<Told> {
        let mut roles: Vec<Role> = before
            .iter()
            .map(|&(stage, replica)| Role::DiffusionStage { stage, replica })
            .collect();
        settle(roles.iter_mut().collect(), known);
        let told = roles.iter().map(|role| match *role {
            Role::DiffusionStage { stage, replica } => (stage, replica),
            _ => UNKNOWN,
        });
        told.collect()
    }

    fn at(stage: u32, replica: u32) -> Told {
        (Some(stage), Some(replica))
    }

    #[rstest]
    #[case::behind_the_llm_stages(&[0, 1], 1, &[at(2, 0)])]
    #[case::in_the_gap(&[0, 2], 1, &[at(1, 0)])]
    #[case::in_front(&[1], 1, &[at(0, 0)])]
    #[case::replicas_in_order(&[0], 3, &[at(1, 0), at(1, 1), at(1, 2)])]
    #[case::nothing_but_diffusion(&[], 2, &[at(0, 0), at(0, 1)])]
    #[case::a_process_for_each_gap(&[1, 3], 2, &[at(0, 0), at(2, 0)])]
    #[case::gaps_and_processes_differ(&[1, 3], 3, &[UNKNOWN, UNKNOWN, UNKNOWN])]
    fn elimination_and_order(#[case] llm: &[u32], #[case] processes: usize, #[case] want: &[Told]) {
        assert_eq!(settled(&vec![UNKNOWN; processes], &known(llm)), want);
    }

    #[test]
    fn the_command_line_tells_the_stage_and_a_headless_launcher_no_replica() {
        let mut known = Known {
            stage: Some(4),
            ..known(&[0])
        };
        assert_eq!(settled(&[UNKNOWN; 2], &known), [at(4, 0), at(4, 1)]);
        known.is_headless = true;
        assert_eq!(settled(&[UNKNOWN; 2], &known), [(Some(4), None); 2]);
    }

    #[test]
    fn what_is_given_comes_first_and_may_be_too_little() {
        let known = Known {
            stage: Some(4),
            is_headless: true,
            given: &[(2, 5), (1, 0)],
            ..known(&[0])
        };
        assert_eq!(settled(&[UNKNOWN; 3], &known), [at(2, 5), at(1, 0), UNKNOWN]);
    }

    #[test]
    fn orphans_stay_unknown() {
        assert_eq!(settled(&[UNKNOWN], &Known::default()), [UNKNOWN]);
    }

    #[test]
    fn a_place_is_kept_and_a_successor_takes_the_free_one() {
        assert_eq!(settled(&[at(1, 1), UNKNOWN], &known(&[0])), [at(1, 1), at(1, 0)]);
    }

    #[test]
    fn a_place_that_an_llm_stage_claims_is_given_up() {
        assert_eq!(settled(&[at(0, 0)], &known(&[0])), [at(1, 0)]);
    }
}
