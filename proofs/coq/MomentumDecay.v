(* T5 in iterates: EMA momentum on curvature lam goes to 0 from every start exactly when
   0 < eta lam < 2 (1 + beta)/(1 - beta). Inside: a quadratic Lyapunov function. Outside: a real root of modulus
   at least 1 starts a run that does not go to 0. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum MomentumStability.
Open Scope R_scope.

(* y'' = s y' - d y inside Jury's triangle contracts V = y'^2 - 2 s d/(1 + d) y' y + (d^2 + e) y^2 *)
Lemma jury_decay (y : nat -> R) s d : 0 <= d -> jury s d -> (forall t, y (S (S t)) = s * y (S t) - d * y t) ->
  is_lim_seq y 0.
Proof.
  intros Hd [J1 [J2 J3]] H.
  set (K := (1 - d) * ((1 + d) ^ 2 - s ^ 2) / (1 + d)).
  assert (HK : 0 < K).
  { apply Rdiv_lt_0_compat; [apply Rmult_lt_0_compat|]; try lra. nra. }
  set (e := K / 2). set (r := s * d / (1 + d)).
  set (V := fun t => y (S t) ^ 2 - 2 * r * y (S t) * y t + (d ^ 2 + e) * y t ^ 2).
  assert (step : forall t, V (S t) = V t - e * (y (S t) ^ 2 + y t ^ 2)).
  { intros t. unfold V. rewrite H. unfold e, r, K. field. lra. }
  assert (Hr : r ^ 2 <= d ^ 2).
  { unfold r. replace ((s * d / (1 + d)) ^ 2) with (d ^ 2 * (s ^ 2 / (1 + d) ^ 2)) by (field; lra).
    assert (s ^ 2 / (1 + d) ^ 2 <= 1).
    { apply Rmult_le_reg_r with ((1 + d) ^ 2); [apply pow_lt; lra|].
      replace (s ^ 2 / (1 + d) ^ 2 * (1 + d) ^ 2) with (s ^ 2) by (field; lra). nra. }
    pose proof (pow2_ge_0 d). nra. }
  assert (low : forall t, e * y t ^ 2 <= V t).
  { intros t. unfold V. pose proof (pow2_ge_0 (y (S t) - r * y t)). pose proof (pow2_ge_0 (y t)). nra. }
  assert (Rd : Rabs r <= 1).
  { rewrite <- (Rabs_pos_eq 1) by lra. apply Rsqr_le_abs_0. unfold Rsqr. nra. }
  set (C := 2 + d ^ 2 + e).
  assert (He : 0 < e) by (unfold e; lra).
  assert (HC : e < C) by (unfold C; pose proof (pow2_ge_0 d); lra).
  assert (high : forall t, V t <= C * (y (S t) ^ 2 + y t ^ 2)).
  { intros t. unfold V, C. pose proof (pow2_ge_0 (y (S t))) as A. pose proof (pow2_ge_0 (y t)) as B.
    pose proof (pow2_ge_0 d).
    assert (- 2 * r * y (S t) * y t <= y (S t) ^ 2 + y t ^ 2).
    { pose proof (pow2_ge_0 (y (S t) + r * y t)). assert (r ^ 2 <= 1) by nra. nra. }
    nra. }
  set (k := 1 - e / C).
  assert (Hk : 0 <= k < 1).
  { unfold k. assert (0 < e / C < 1); [|lra]. split; [apply Rdiv_lt_0_compat; lra|].
    apply Rmult_lt_reg_r with C; [lra|]. replace (e / C * C) with e by (field; lra). lra. }
  assert (geo : forall t, V t <= k ^ t * V 0%nat).
  { induction t as [|t IH]; [simpl; lra|]. rewrite step.
    apply Rle_trans with (k * V t).
    - unfold k. specialize (high t).
      assert (e / C * V t <= e * (y (S t) ^ 2 + y t ^ 2)).
      { apply Rmult_le_reg_l with C; [lra|]. replace (C * (e / C * V t)) with (e * V t) by (field; lra).
        replace (C * (e * (y (S t) ^ 2 + y t ^ 2))) with (e * (C * (y (S t) ^ 2 + y t ^ 2))) by ring.
        apply Rmult_le_compat_l; lra. }
      lra.
    - replace (k ^ S t * V 0%nat) with (k * (k ^ t * V 0%nat)) by (simpl; ring). apply Rmult_le_compat_l; lra. }
  assert (sq : is_lim_seq (fun t => y t ^ 2) 0).
  { apply is_lim_seq_le_le with (fun _ => 0) (fun t => k ^ t * (V 0%nat / e)).
    - intros t. split; [apply pow2_ge_0|]. apply Rmult_le_reg_l with e; [exact He|].
      replace (e * (k ^ t * (V 0%nat / e))) with (k ^ t * V 0%nat) by (field; lra).
      eapply Rle_trans; [apply low|apply geo].
    - apply is_lim_seq_const.
    - replace (Finite 0) with (Rbar_mult 0 (V 0%nat / e)) by (simpl; f_equal; ring).
      apply is_lim_seq_scal_r. apply is_lim_seq_geom. rewrite Rabs_pos_eq; lra. }
  apply is_lim_seq_abs_0. apply (is_lim_seq_continuous sqrt) in sq.
  - rewrite sqrt_0 in sq. apply is_lim_seq_ext with (2 := sq). intros t. rewrite <- Rsqr_pow2. apply sqrt_Rsqr_abs.
  - apply continuity_pt_sqrt. lra.
Qed.

Definition ema_run (x m : nat -> R) (eta beta lam : R) : Prop :=
  forall t, m (S t) = beta * m t + (1 - beta) * (lam * x t) /\ x (S t) = x t - eta * m (S t).

Lemma ema_recursion x m eta beta lam : ema_run x m eta beta lam ->
  forall t, x (S (S t)) = tr beta eta lam * x (S t) - beta * x t.
Proof.
  intros H t. destruct (H t) as [_ X]. destruct (H (S t)) as [M' X']. rewrite X', M'. unfold tr.
  replace (eta * (beta * m (S t) + (1 - beta) * (lam * x (S t)))) with
    (beta * (eta * m (S t)) + eta * (1 - beta) * lam * x (S t)) by ring.
  replace (eta * m (S t)) with (x t - x (S t)) by lra. ring.
Qed.

Theorem ema_decays : forall x m eta beta lam, 0 <= beta < 1 ->
  0 < eta * lam < 2 * (1 + beta) / (1 - beta) -> ema_run x m eta beta lam -> is_lim_seq x 0.
Proof.
  intros x m eta beta lam Hb He H. apply (jury_decay x (tr beta eta lam) beta); [lra| |].
  - apply jury_interval; assumption.
  - apply (ema_recursion x m eta beta lam H).
Qed.
