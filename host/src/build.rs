//! What this program was built from, and for.

use std::sync::LazyLock;

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit, or `unknown` (see the build script).
pub(crate) const COMMIT: &str = env!("STATEHOUSE_BUILD_COMMIT");

/// The target, such as `x86_64-unknown-linux-gnu`.
pub(crate) const TARGET: &str = env!("STATEHOUSE_BUILD_TARGET");

/// The features that were compiled in, as `cargo build --features` takes them, or `none`. Those of
/// `statehouse-precompiled` are asked of that crate, because other crates of a build enable them too.
pub(crate) static FEATURES: LazyLock<String> = LazyLock::new(|| {
    let mut names = Vec::new();
    if cfg!(feature = "cluster") {
        names.push("cluster");
    }
    names.extend(statehouse_precompiled::FEATURES);
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(","),
    }
});

/// The text of `--version` after the name of the program.
pub(crate) static IN_FULL: LazyLock<String> =
    LazyLock::new(|| format!("{VERSION} ({COMMIT}, {TARGET}, features: {})", *FEATURES));
