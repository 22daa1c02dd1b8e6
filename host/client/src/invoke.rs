//! Commands without a typed method: those of a policy.

use crate::client::Client;
use crate::error::Error;
use crate::resp::{RespValue, parse};
use crate::version::Version;

/// The response to [`Client::invoke`].
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// The value in the payload.
    pub value: RespValue,
    /// The version property, if the response has one.
    pub version: Option<Version>,
}

impl Client {
    /// Sends any command, such as one that a policy of the store adds.
    ///
    /// ```no_run
    /// # async fn example(client: statehouse_client::Client) -> Result<(), statehouse_client::Error> {
    /// let counted = client.invoke(["INCR", "visits"], None).await?;
    /// println!("{:?}", counted.value);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`] for an error response, [`Error::Protocol`] for a payload that is not one
    /// value of RESP3; otherwise see [`Error`].
    pub async fn invoke(
        &self,
        arguments: impl IntoIterator<Item = impl AsRef<[u8]>>,
        fencing_token: Option<&Version>,
    ) -> Result<Response, Error> {
        let arguments: Vec<_> = arguments.into_iter().collect();
        let arguments: Vec<&[u8]> = arguments.iter().map(AsRef::as_ref).collect();
        if arguments.is_empty() {
            return Err(Error::Invalid("a command has at least one word".into()));
        }
        let answer = self.request(&arguments, fencing_token).await?;
        match parse(&answer.payload) {
            Ok(RespValue::Error(text)) => Err(Error::Refused(
                text.strip_prefix("ERR ").unwrap_or(&text).to_owned(),
            )),
            Ok(value) => Ok(Response {
                value,
                version: answer.version,
            }),
            Err(malformed) => Err(Error::Protocol(malformed.0.into())),
        }
    }
}
