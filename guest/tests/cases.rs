//! Runs the transcripts of `cases/` over the table of the SDK. The host runs the same files over
//! the component.

use statehouse_guest::Standard;
use statehouse_policy::Policy;
use statehouse_policy::testing::{Tabled, cases};

#[test]
fn transcripts_pass() {
    let policy = Standard::configure(&[]).expect("it takes no options");
    // The minimum of requests keeps a missing or empty file from passing.
    for (name, text, requests_min) in [
        ("form", include_str!("../cases/form.txt"), 120),
        ("answers", include_str!("../cases/answers.txt"), 120),
        ("clock", include_str!("../cases/clock.txt"), 20),
        ("fence", include_str!("../cases/fence.txt"), 60),
        ("expiry", include_str!("../cases/expiry.txt"), 25),
        ("notify", include_str!("../cases/notify.txt"), 40),
        ("scan", include_str!("../cases/scan.txt"), 20),
        ("extensions", include_str!("../cases/extensions.txt"), 30),
    ] {
        let run = cases::run(text, &mut Tabled::new(&policy));
        let requests = run.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(requests >= requests_min, "{name}: only {requests} requests");
    }
}
