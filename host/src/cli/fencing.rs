//! The option --fencing-token of all commands that write.

use statehouse_client::Version;

/// The option --fencing-token.
#[derive(Debug, clap::Args)]
pub(super) struct Fencing {
    /// The fencing token: the version of the lock that protects the key
    #[arg(id = "fencing_token", long = "fencing-token", value_name = "VERSION")]
    pub(super) token: Option<Version>,
}
