//! Form tokens: keys that the server issues, for forms whose fields are no key.
//!
//! The page asks for a token, the form carries it back in a hidden field, and the request is protected as by any
//! key: sent twice, by a double click, the back button or a reload, it runs once, and both get the first answer.
//!
//! ```
//! use std::time::Duration;
//! use actix_idempotency::{FormTokens, Idempotency, OnOutstanding, Policy, TokenIssuer};
//! use actix_web::{HttpResponse, Result, web};
//!
//! async fn page(tokens: TokenIssuer) -> Result<HttpResponse> {
//!     let token = tokens.issue("checkout")?.hidden_input();
//!     let form = format!("<form method=\"post\" action=\"/checkout/order\">{token} …</form>");
//!     Ok(HttpResponse::Ok().content_type("text/html; charset=utf-8").body(form))
//! }
//!
//! async fn buy() -> HttpResponse {
//!     HttpResponse::Created().body("Thank you for your order.")
//! }
//!
//! fn configure(config: &mut web::ServiceConfig, idempotency: &Idempotency, tokens: &FormTokens) {
//!     // A second click waits for what the first one gets; by default it is told 409 at once.
//!     let policy = Policy::new()
//!         .form_token(tokens, "checkout")
//!         .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10)));
//!     config.app_data(web::Data::new(tokens.clone())).service(
//!         web::scope("/checkout")
//!             .wrap(idempotency.with(policy))
//!             .route("", web::get().to(page))
//!             .route("/order", web::post().to(buy)),
//!     );
//! }
//! ```
//!
//! # What a token is
//!
//! A random id, an action, a principal and an expiry, signed by HMAC-SHA-256. Issuing writes nothing, so that
//! nobody fills the table by asking. Tokens know nothing of each other: two tabs have two, and each is good for one
//! order. A GET, a HEAD or a prefetch never uses one up, as no policy protects safe methods.
//!
//! A request may carry it in the field [`form_token`](crate::FORM_TOKEN_FIELD) of a form
//! (`application/x-www-form-urlencoded` or `multipart/form-data`) or in the header
//! [`Form-Token`](crate::header::FORM_TOKEN), or in both, where it has to be the same. Where
//! [`Policy::stream_body`](crate::Policy::stream_body) lets an upload through unread, it is in the header, or in the
//! first field of a multipart form, which is looked at and put back.
//!
//! # What is judged, in which order
//!
//! 1. The token itself. What is none is 400 `token-invalid`; one that was signed with another key, tampered with,
//!    issued for another action or to somebody else is 403 with a code for each. Nothing is consumed.
//! 2. Its row. What was answered is answered again, though the token may have expired meanwhile. While the first
//!    request runs, the second waits or gets 409, as the policy says.
//! 3. Its expiry, by the database's clock, within the statement that claims: an expired token claims nothing, neither
//!    for the first time nor after an attempt that failed or died (403 `token-expired`). A handler that has begun may
//!    end later.
//!
//! | the form was sent before, and | the same contents | other contents |
//! |---|---|---|
//! | it was answered below 400 | the first answer again; 409 `token-used` under [`OnCompleted::Reject`] | 409 `token-used` |
//! | it was rejected (4xx that [`Keep`](crate::Keep) does not keep) | runs | runs: the corrected form |
//! | it failed (5xx, panic), or its process died | runs | 422 `key-reused`; under [`Policy::atomic`] it runs |
//! | it is running | 409 `outstanding`, or the answer when it is there | 422 `key-reused`; under [`Policy::atomic`] 409 |
//!
//! `token-used`, `token-expired` and all the others can be pages of yours: [`Policy::wording`] with
//! [`Wording::body`](crate::Wording::body).
//!
//! **A form that is shown again with its errors is no success.** Answer it with 422, and the token is free for the
//! corrected form: show the same one again, which a handler gets by taking [`FormToken`](crate::FormToken). With 200 it would count as done, and the corrected form would get 409
//! `token-used`; where it has to be 200, say [`IdemKey::release`](crate::IdemKey::release).
//!
//! # The page
//!
//! Do not send it with `Cache-Control: no-store`: a browser that goes back then loads a new form with a new token,
//! and a second click is a second order. `private, no-cache` keeps it from being reused for a new visit and lets the
//! back button show it as it was. And let the form be sent to another path than the page's: once a POST to it has
//! succeeded, a browser forgets the page that it had there.
//!
//! # Cross-site requests (CSRF)
//!
//! A token is also what a page of another site cannot know, so that a policy that
//! [requires](crate::Policy::require_key) one (as [`Policy::form_token`] does) accepts no form of theirs in the name
//! of a user. That holds where tokens belong to a principal; [`anonymous`](crate::FormTokens::anonymous) ones anybody
//! can get. It holds for what the policy protects: other routes and methods, requests that the policy skips, and a
//! GET that changes something are not covered; nor is a login form, before which there is no principal. It is no
//! help against scripts that run in your own pages. A token that was used is not turned away but gets the first
//! answer, which does nothing once more. Cookies with `SameSite` belong to it all the same.
//!
//! [`OnCompleted::Reject`]: crate::OnCompleted::Reject
//! [`Policy::atomic`]: crate::Policy::atomic
//! [`Policy::form_token`]: crate::Policy::form_token
//! [`Policy::wording`]: crate::Policy::wording

mod issuing;
pub(crate) mod submitted;

pub use self::issuing::TokenIssuer;
