//! `omnitap check` on this machine, with a real trial of the tap.

use omnitap::check::{self, Status};

#[test]
fn the_trial_tells_the_truth() {
    let report = check::run(None, None);
    eprintln!("{report}");
    // Root or not, the conditions and the trial agree: a tap that can't work is told by both.
    let judged = check::Facts::read().judge().works();
    assert_eq!(report.works(), judged, "{report}");
    if judged {
        let probe = report.items.iter().find(|item| item.name == "trial: probe");
        assert!(probe.is_some_and(|item| item.status == Status::Pass), "{report}");
    } else {
        eprintln!("SKIPPED: the tap can't work here, so the trial only had to say so");
    }
}
