//! Whether a client learns from a refusal what to do.

use serde_json::Value;

use crate::{
    service::{Answer, Service},
    table::{Finding, Source::Draft, Table, fail, judge, not_applicable, pass},
};

/// The refusals by the status that they should have, where there were any.
pub async fn described(refusals: &[(u16, Option<Answer>)], service: &Service, table: &mut Table) {
    for (status, refusal) in refusals {
        let finding = match refusal {
            None => not_applicable(format!("no {status}")),
            Some(refusal) => description(refusal),
        };
        table.row(Draft("2.7"), format!("the {status} is described: problem+json, or a Link"), Ok(finding));
    }
    // The draft asks for it in these two.
    let linking: Vec<_> =
        refusals.iter().filter(|(status, _)| *status != 409).filter_map(|(_, refusal)| refusal.as_ref()).collect();
    let links: Vec<_> = linking.iter().filter_map(|refusal| documentation(refusal)).collect();
    let finding = match linking.len() {
        0 => not_applicable("no 400, no 422"),
        n => judge(links.len() == n, links.first().cloned().unwrap_or_else(|| "no link".into())),
    };
    table.row(Draft("2.7"), "the 400 and the 422 link to documentation", Ok(finding));
    let (published, expiry) = match links.first() {
        None => (not_applicable("no link to it"), not_applicable("no link to it")),
        Some(link) => specification(service, link).await,
    };
    table.row(Draft("2.5.2"), "the specification is published there", Ok(published));
    table.row(Draft("2.5.2"), "it tells of expiry", Ok(expiry));
}

fn description(refusal: &Answer) -> Finding {
    match problem(refusal).and_then(|problem| Some(problem["title"].as_str()?.to_owned())) {
        Some(title) => pass(title),
        None if described_by(refusal).is_some() => pass("Link: rel=describedby"),
        None => fail(format!("{}, {} bytes", header(refusal, "content-type").unwrap_or("no type"), refusal.body.len())),
    }
}

fn problem(refusal: &Answer) -> Option<Value> {
    header(refusal, "content-type").filter(|kind| kind.starts_with("application/problem+json"))?;
    serde_json::from_slice(&refusal.body).ok()
}

fn documentation(refusal: &Answer) -> Option<String> {
    let of_problem = || Some(problem(refusal)?["type"].as_str()?.to_owned()).filter(|link| link != "about:blank");
    described_by(refusal).or_else(of_problem)
}

/// The target of `Link: <…>; rel="describedby"`.
fn described_by(refusal: &Answer) -> Option<String> {
    let link = header(refusal, "link").filter(|link| link.contains("describedby"))?;
    Some(link.split_once('<')?.1.split_once('>')?.0.to_owned())
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers.get(name)?.to_str().ok()
}

async fn specification(service: &Service, link: &str) -> (Finding, Finding) {
    let page = match service.linked(link).await {
        Ok(page) if page.is_success() => page,
        Ok(page) => return (fail(format!("{} at {link}", page.status)), not_applicable("no specification")),
        // Without TLS nothing can be said of it.
        Err(error) if link.starts_with("https:") => {
            return (not_applicable(format!("look yourself: {error}")), not_applicable("look yourself"));
        }
        Err(error) => return (fail(error), not_applicable("no specification")),
    };
    let text = String::from_utf8_lossy(&page.body).to_lowercase();
    let word = ["expir", "retention", "retained"].into_iter().find(|word| text.contains(word));
    (pass(page.status.to_string()), judge(word.is_some(), word.unwrap_or("no word of it")))
}
