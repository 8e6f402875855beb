//! What to send, and to whom. The defaults fit the shop of this crate.

use std::time::Duration;

use reqwest::{
    Method, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};

pub const USAGE: &str = r#"usage: conformance URL [OPTION ...]

  --method POST              of the operation
  --body '{"product_id": 1, "quantity": 1}'
  --other-body '{"product_id": 1, "quantity": 2}'   another, valid request; '' if there is none
  --header 'NAME: VALUE'     of every request; as often as you like; 'NAME:' takes a default one away. Default:
                             'Content-Type: application/json', 'Authorization: Bearer alice'
  --other-user 'Authorization: Bearer bob'   the credential of somebody else; none where you name Authorization yourself
  --slow 'X-Demo-Slow-Ms: 2000'   the header that makes the service slow, if it has such a thing; '' if not
  --fail 'X-Demo-Fail: 500'      the header that makes one attempt fail, likewise
  --required                 the service documents that a key is required
  --bare                     keys are sent bare (abc) and not as the draft wants them ("abc")
  --patience 60              seconds to wait for a request whose client has gone"#;

pub type Pair = (HeaderName, HeaderValue);

pub struct Options {
    pub url: Url,
    pub method: Method,
    pub body: String,
    pub other_body: Option<String>,
    pub headers: HeaderMap,
    pub other_user: Option<Pair>,
    pub slow: Option<Pair>,
    pub fail: Option<Pair>,
    pub required: bool,
    pub bare: bool,
    pub patience: Duration,
}

impl Options {
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut url = None;
        let mut other_user = None;
        let (mut method, mut required, mut bare) = (Method::POST, false, false);
        let mut body = r#"{"product_id": 1, "quantity": 1}"#.to_owned();
        let mut other_body = Some(r#"{"product_id": 1, "quantity": 2}"#.to_owned());
        let mut headers = HeaderMap::from_iter([
            (CONTENT_TYPE, HeaderValue::from_static("application/json")),
            (AUTHORIZATION, HeaderValue::from_static("Bearer alice")),
        ]);
        let mut default_user = true;
        let mut slow = pair("X-Demo-Slow-Ms: 2000")?;
        let mut fail = pair("X-Demo-Fail: 500")?;
        let mut patience = Duration::from_secs(60);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} wants a value"));
            match argument.as_str() {
                "--method" => method = value()?.parse().map_err(|_| "--method: no method")?,
                "--body" => body = value()?,
                "--other-body" => other_body = Some(value()?).filter(|body| !body.is_empty()),
                "--header" => {
                    let (name, value) = split(&value()?)?;
                    default_user &= name != AUTHORIZATION;
                    headers.remove(&name);
                    if !value.is_empty() {
                        headers.insert(name, value);
                    }
                }
                "--other-user" => other_user = pair(&value()?)?,
                "--slow" => slow = pair(&value()?)?,
                "--fail" => fail = pair(&value()?)?,
                "--required" => required = true,
                "--bare" => bare = true,
                "--patience" => {
                    patience = Duration::from_secs(value()?.parse().map_err(|_| "--patience: no number of seconds")?);
                }
                option if option.starts_with('-') => return Err(format!("{option}: no such option")),
                address => url = Some(Url::parse(address).map_err(|error| format!("{address}: {error}"))?),
            }
        }
        let url = url.ok_or("which URL?")?;
        if url.scheme() != "http" {
            return Err(format!("{url}: http:// only, there is no TLS in this example"));
        }
        if !url.username().is_empty() {
            return Err("a credential belongs into --header, not into the URL".into());
        }
        if default_user && other_user.is_none() {
            other_user = pair("Authorization: Bearer bob")?;
        }
        Ok(Self { url, method, body, other_body, headers, other_user, slow, fail, required, bare, patience })
    }
}

/// `NAME: VALUE`, or nothing.
fn pair(text: &str) -> Result<Option<Pair>, String> {
    if text.is_empty() { Ok(None) } else { split(text).map(Some) }
}

fn split(text: &str) -> Result<Pair, String> {
    let (name, value) = text.split_once(':').ok_or_else(|| format!("{text:?} is not NAME: VALUE"))?;
    let name = name.trim().parse().map_err(|_| format!("{name:?} is no name of a header"))?;
    Ok((name, value.trim().parse().map_err(|_| format!("{text:?}: no value of a header"))?))
}
